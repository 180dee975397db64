"""Experts multiplied on the CPU, beside their weights in host memory, for an accelerator that others are brought to.

The engine's thread sends the tokens down, queues all that is brought and computed on the device, and multiplies while
the device works at that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..model.experts import Visits, multiplied_bare
from ..model.loading import LoadedModel
from ..plan.placement.feedforward import CpuShare
from ..plan.shape.shapes import Stage
from ..stream.exchange import HostExchange, Trip
from ..stream.experts import ExpertStream
from ..weights.stage_weights import stage_weights
from .monitor import PassMonitor


@dataclass(frozen=True, kw_only=True)
class Errand:
    """The tokens of the visits to `experts`, one expert's behind the other's, on their way to the CPU and back."""

    stage: int
    module: torch.nn.Module
    path: str  # of the module, as parameters' names begin
    experts: Sequence[int]  # that ascend
    num_visits: Sequence[int]
    trip: Trip


@dataclass(frozen=True, kw_only=True)
class CpuExperts:
    """One per engine, whose thread calls it. `shared`: the stages that it may be asked about, whose experts live in
    host memory. `first_layer`: the stage of decoder layer 0."""

    loaded: LoadedModel
    share: CpuShare
    shared: frozenset[int]
    stream: ExpertStream
    exchange: HostExchange
    monitor: PassMonitor
    first_layer: int

    def send(
        self, stage: int, module: torch.nn.Module, path: str, hidden_TD: torch.Tensor, visits: Visits
    ) -> Errand | None:
        """Begins to bring down what the CPU's share of a stage's experts needs; None where the CPU has none."""
        num_visits = {expert: visits.of(expert).stop - visits.of(expert).start for expert in visits.hit}
        taken = self.share.of_cpu(num_visits, len(hidden_TD)) if stage in self.shared else frozenset[int]()
        if not taken:
            return None
        experts = sorted(taken)
        x_VD = hidden_TD[torch.cat([visits.tokens_V[visits.of(expert)] for expert in experts])]
        out_VD = self.exchange.new(x_VD.shape, x_VD.dtype)
        return Errand(
            stage=stage,
            module=module,
            path=path,
            experts=experts,
            num_visits=[num_visits[expert] for expert in experts],
            trip=self.exchange.send(stage - self.first_layer, [x_VD], out_VD),
        )

    def outputs(self, errand: Errand) -> Iterator[tuple[int, torch.Tensor]]:
        """What each expert of the errand makes of its tokens (V, D), in compute memory, for compute that is queued from
        now on. Multiplies on this thread, and those that help it."""
        [x_VD] = errand.trip.arrived()
        name = f"{len(errand.experts)} experts {errand.stage}"
        errand.trip.answer(self.monitor.shown(name, lambda: self._multiplied(errand, x_VD)))
        yield from zip(errand.experts, errand.trip.receive().split(list(errand.num_visits)), strict=True)

    def _multiplied(self, errand: Errand, x_VD: torch.Tensor) -> torch.Tensor:
        """What becomes of all tokens of the errand, in float32 whatever the device computes in: a CPU's products are
        made for it."""
        out_VD, first = torch.empty_like(x_VD), 0
        for expert, num_visits in zip(errand.experts, errand.num_visits, strict=True):
            rows = slice(first, first + num_visits)
            matrices = self._matrices(errand, expert)
            out_VD[rows] = multiplied_bare(errand.module, matrices, expert, x_VD[rows].float())
            first = rows.stop
        return out_VD

    def _matrices(self, errand: Errand, expert: int) -> dict[str, torch.Tensor]:
        found = self.stream.in_host(errand.stage, expert)
        return host_matrices(
            self.loaded, found.stage, found.placed.buffer, found.placed.tensor_offsets, prefix=f"{errand.path}."
        )


def host_matrices(
    loaded: LoadedModel, expert: Stage, buffer: torch.Tensor, tensor_offsets: Mapping[str, int], *, prefix: str
) -> dict[str, torch.Tensor]:
    """The matrices of one expert where its bytes lie in host memory, to be multiplied in float32, by the names that
    their module has behind `prefix`."""
    dtypes = {parameter.name: torch.float32 for parameter in expert.parameters}
    weights = stage_weights(expert, buffer, tensor_offsets, dtypes, loaded.backends)
    return {name.removeprefix(prefix): weight[0] for name, weight in weights.items()}
