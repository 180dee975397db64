"""Runs experts once for all lanes that wait at them (MoE-Gen's module batching), with resident or paged weights. The
CPU may multiply some experts for an accelerator, with weights in host memory, while the device computes others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from ..events import NeedExperts
from ..model.expert_groups import can_run_group, run_group, run_on_device, run_on_host
from ..model.experts import (
    Experts,
    Matrices,
    Visits,
    accumulate_outputs,
    bound_matrices,
    expert_output,
    find_expert_share,
    is_experts,
    mix_experts,
    run_bare_expert,
)
from ..model.loading import LoadedModel
from ..plan.placement.feedforward import CpuShare
from ..plan.shape.shapes import Stage
from ..stream.exchange import HostExchange, RoundTrip
from ..stream.experts import ExpertBytes, ExpertStream
from ..weights.stage_weights import stage_weights
from .monitor import PassMonitor


@dataclass(frozen=True, kw_only=True)
class CpuExpertTask:
    """Tokens that visit `experts`, grouped by expert, on their way to the CPU and back."""

    stage: int
    module: torch.nn.Module
    path: str  # prefix of the module's parameter names
    experts: Sequence[int]  # ascending
    num_visits: Sequence[int]
    round_trip: RoundTrip

    @property
    def name(self) -> str:
        return f"{len(self.experts)} experts {self.stage}"

    @property
    def expert_rows(self) -> Iterator[tuple[int, slice]]:
        """Each expert with the slice of its tokens."""
        first = 0
        for expert, num_visits in zip(self.experts, self.num_visits, strict=True):
            yield expert, slice(first, first + num_visits)
            first += num_visits

    def receive(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each expert with its output in compute memory, for compute queued from now on."""
        yield from zip(self.experts, self.round_trip.receive().split(list(self.num_visits)), strict=True)


@dataclass(frozen=True, kw_only=True)
class CpuExperts:
    """The CPU's share of experts; only the engine's thread calls it. `host_stages`: stages with experts in host memory.
    `first_layer`: the stage of decoder layer 0."""

    loaded: LoadedModel
    share: CpuShare
    host_stages: frozenset[int]
    stream: ExpertStream
    exchange: HostExchange
    monitor: PassMonitor
    first_layer: int

    def send(
        self, stage: int, module: torch.nn.Module, path: str, hidden_TD: torch.Tensor, visits: Visits
    ) -> CpuExpertTask | None:
        """Starts copying the tokens of the CPU's experts to the host. None if the CPU has no share in this stage."""
        num_visits = {
            expert: visits.expert_rows(expert).stop - visits.expert_rows(expert).start for expert in visits.hit
        }
        if stage not in self.host_stages:
            return None
        experts = sorted(self.share.choose_experts(num_visits, len(hidden_TD)))
        if not experts:
            return None
        x_VD = hidden_TD[torch.cat([visits.tokens_V[visits.expert_rows(expert)] for expert in experts])]
        out_VD = self.exchange.new_tensor(x_VD.shape, x_VD.dtype)
        return CpuExpertTask(
            stage=stage,
            module=module,
            path=path,
            experts=experts,
            num_visits=[num_visits[expert] for expert in experts],
            round_trip=self.exchange.send(stage - self.first_layer, [x_VD], out_VD),
        )

    def outputs(self, task: CpuExpertTask) -> Iterator[tuple[int, torch.Tensor]]:
        """Multiplies on the CPU. Yields each expert with its output (V, D) in compute memory."""
        [x_VD] = task.round_trip.wait_for_inputs()
        task.round_trip.send_output(self.monitor.run_traced(task.name, lambda: self._multiply(task, x_VD)))
        yield from task.receive()

    def _multiply(self, task: CpuExpertTask, x_VD: torch.Tensor) -> torch.Tensor:
        """Outputs for all tokens of the task, computed in float32, which CPU kernels are made for."""
        out_VD, weights_of = torch.empty_like(x_VD), partial(host_weights, self.loaded)
        for expert, rows in task.expert_rows:
            matrices = self.stream.host_expert(task.stage, expert).matrices(weights_of, prefix=f"{task.path}.")
            out_VD[rows] = run_bare_expert(task.module, matrices, x_VD[rows].float())
        return out_VD


def host_weights(
    loaded: LoadedModel, expert: Stage, buffer: torch.Tensor, tensor_offsets: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """The weights of one expert, as views of host memory, for float32 products."""
    dtypes = {parameter.name: torch.float32 for parameter in expert.parameters}
    return stage_weights(expert, buffer, tensor_offsets, dtypes, loaded.backends)


class BatchedExperts:
    """Runs the experts of a stage; only the engine calls it. `stream`: open; None if no stage is paged. `is_grouped`:
    run resident experts in one grouped product, on an accelerator. `cpu`: multiplies the CPU's share, if any."""

    def __init__(
        self,
        loaded: LoadedModel,
        paged: frozenset[int],
        stream: ExpertStream | None,
        *,
        is_grouped: bool,
        cpu: CpuExperts | None = None,
    ):
        assert not paged or stream is not None, f"stages {sorted(paged)} are paged without a stream"
        self._loaded, self._paged, self._stream, self._is_grouped = loaded, paged, stream, is_grouped
        self._cpu = cpu
        self._names = {
            module: f"{streamed.name}.{path}" if path else streamed.name
            for streamed in loaded.staged.modules
            for path, module in streamed.inner.named_modules()
            if is_experts(module)
        }

    def prefetch(self, stage: int) -> None:
        """Starts reads for the next `run`. Call it as soon as its stage is known."""
        if self._stream is not None and stage in self._paged:
            self._stream.prefetch(stage)

    def run(self, stage: int, events: Sequence[NeedExperts]) -> list[torch.Tensor]:
        """Runs one experts module for all lanes that wait at it. Returns their outputs (T, D) in the order of `events`,
        as views of one tensor. Each visited expert runs once, over its tokens of all lanes; a paged one is read once
        per call. A token's outputs are summed in ascending order of experts, as in transformers, so results differ only
        by the shapes of products. Raises CheckpointError if a read fails."""
        module = events[0].module
        assert all(event.module is module for event in events), "lanes wait at different experts modules"
        hidden_TD, index_TK, weights_TK = events[0].hidden_TD, events[0].top_k_index_TK, events[0].top_k_weights_TK
        if len(events) > 1:  # all tokens, lane by lane
            hidden_TD = torch.cat([event.hidden_TD for event in events])
            index_TK = torch.cat([event.top_k_index_TK for event in events])
            weights_TK = torch.cat([event.top_k_weights_TK for event in events])
        is_split = find_expert_share(module) is not None
        is_grouped = self._is_grouped and not is_split and stage not in self._paged
        out_TD = run_on_device(module, hidden_TD, index_TK, weights_TK) if is_grouped else None
        if out_TD is None:
            visits = Visits.from_top_k(index_TK, weights_TK, cast("Experts", module).num_experts)
            path, cpu = self._names[module], self._cpu
            task = cpu.send(stage, module, path, hidden_TD, visits) if cpu is not None and not is_split else None
            if cpu is None or task is None:
                out_TD = self._mix(stage, module, hidden_TD, visits)
            else:  # summed in ascending order of experts: another order would round differently
                device_experts = [expert for expert in visits.hit if expert not in task.experts]
                outputs = {
                    expert: expert_output(module, matrices, expert, hidden_TD, visits)
                    for expert, matrices in self._hit_matrices(stage, module, device_experts)
                }
                outputs.update(cpu.outputs(task))
                out_TD = accumulate_outputs(hidden_TD, visits, ((expert, outputs[expert]) for expert in visits.hit))
        return list(out_TD.split([len(event.hidden_TD) for event in events]))

    def _mix(self, stage: int, module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits) -> torch.Tensor:
        """The weighted sum of each token's expert outputs. Other ranks may hold some experts, or parts of each."""
        share = find_expert_share(module)
        if share is None:
            if not self._is_grouped and stage not in self._paged:
                out_TD = run_on_host(module, hidden_TD, visits)
                if out_TD is not None:
                    return out_TD
            groups = self._groups(stage, module, hidden_TD, visits)
            if groups:
                return self._mix_groups(stage, module, hidden_TD, visits, groups)
            return mix_experts(module, hidden_TD, visits, self._hit_matrices(stage, module, visits.hit))
        hit, first = visits.hit, 0
        if share.own is not None:
            hit, first = [expert for expert in hit if expert in share.own], share.own.start
        return share.mix_experts(module, hidden_TD, visits, self._hit_matrices(stage, module, hit, first))

    def _groups(
        self, stage: int, module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits
    ) -> Sequence[Sequence[int]]:
        """Groups of hit experts that a CPU multiplies by at a time: first those that are in memory, while the others
        are read. Empty if single experts are likely faster."""
        if self._is_grouped or self._stream is None or stage not in self._paged:
            return []
        kept = self._stream.kept(stage, visits.hit)
        others, size = sorted(set(visits.hit) - set(kept)), self._stream.group_size
        groups = [others[first : first + size] for first in range(0, len(others), size)]
        groups = [kept, *groups] if kept else groups
        return groups if any(can_run_group(module, hidden_TD, visits, group) for group in groups[:2]) else []

    def _mix_groups(
        self,
        stage: int,
        module: torch.nn.Module,
        hidden_TD: torch.Tensor,
        visits: Visits,
        groups: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Same as `_mix` on a CPU."""
        assert self._stream is not None, "experts are streamed"
        outputs = dict[int, torch.Tensor]()
        for reads in self._stream.groups(stage, groups):
            own = {read.expert: self._matrices(module, read) for read in reads}
            outputs |= run_group(module, own, hidden_TD, visits)
        return accumulate_outputs(hidden_TD, visits, ((expert, outputs[expert]) for expert in visits.hit))

    def _hit_matrices(
        self, stage: int, module: torch.nn.Module, hit: Sequence[int], first: int = 0
    ) -> Iterator[tuple[int, Matrices]]:
        """Each hit expert with its matrices: read by the stream if the stage is paged, else views of the module's
        weights, which begin with expert `first`."""
        if self._stream is None or stage not in self._paged:
            yield from ((expert, bound_matrices(module, expert - first)) for expert in hit)
            return
        for read in self._stream.experts(stage, hit):
            yield read.expert, self._matrices(module, read)

    def _matrices(self, module: torch.nn.Module, read: ExpertBytes) -> Matrices:
        """The matrices of an expert that the stream has read."""
        weights_of = partial(self._loaded.weights_of, on_device=self._is_grouped)
        overrides = read.matrices(weights_of, f"{self._names[module]}.")
        return bound_matrices(module, read.expert, overrides=overrides)
