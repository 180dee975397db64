"""How fast the experts of a layer run, through the function that runs them in a pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..engine.experts import BatchedExperts, host_matrices
from ..events import NeedExperts, Weights
from ..model.experts import Visits, bound_matrices, is_experts, mixed, multiplied_bare
from ..model.loading import LoadedModel
from ..model.stages import StreamedModule
from ..plan.cost.work import StageWork, stage_works
from ..plan.shape.extents import slot_layout
from ..plan.shape.shapes import Stage
from ..stream.device import ComputeDevice
from .timing import Timed

HOST_ROWS = 64  # of an expert on the CPU: its weights are read once for all of them, and reading has a rate of its own


@dataclass(frozen=True, kw_only=True)
class ExpertProbes:
    """The experts of `stage`, whose `weights` are in compute memory, or of paged ones expert 0 as `paged`."""

    loaded: LoadedModel
    device: ComputeDevice
    stage: Stage
    streamed: StreamedModule
    module: torch.nn.Module
    weights: Weights
    paged: Weights
    work: StageWork

    @staticmethod
    def of(
        loaded: LoadedModel, device: ComputeDevice, stage: Stage, weights: Weights, expert: Weights
    ) -> "ExpertProbes | None":
        """The probes of a layer, or None where no module of it hands its experts out. `weights` and `expert` go by
        whole names."""
        streamed = next(module for module in loaded.staged.modules if module.stage == stage.index)
        found = ((path, module) for path, module in streamed.inner.named_modules() if is_experts(module))
        path, module = next(found, (None, None))
        if module is None:
            return None
        prefix = f"{streamed.name}.{path}."
        return ExpertProbes(
            loaded=loaded,
            device=device,
            stage=stage,
            streamed=streamed,
            module=module,
            weights=weights,
            paged={name.removeprefix(prefix): weight[0] for name, weight in expert.items()},
            work=stage_works(loaded.shape, frozenset())[stage.index],
        )

    def rates(self, pass_tokens: Sequence[int]) -> dict[int, float]:
        """FLOPs per second by the rows of one expert, in passes of so many tokens."""
        found: dict[int, float] = {}
        with self.streamed.binding.bound(self.weights):
            for num_tokens in pass_tokens:
                num_visits = num_tokens * self.work.num_experts_per_token
                num_rows = max(1, round(num_visits / self.work.hits(num_tokens)))
                found[num_rows] = (self._alone(num_rows) if self.paged else self._routed(num_tokens)).rate()
        return found

    def _flops(self, num_visits: int) -> float:
        return 2.0 * num_visits * self.work.expert_weights

    def _hidden(self, num_tokens: int) -> torch.Tensor:
        shape = num_tokens, self.loaded.shape.hidden_size
        return torch.ones(shape, dtype=self.loaded.compute_dtype, device=self.device.torch_device)

    def _routed(self, num_tokens: int) -> Timed:
        """Tokens that choose among all experts of the layer at random, and so unevenly."""
        stage, place, hidden_TD = self.stage, self.device.torch_device, self._hidden(num_tokens)
        order = torch.rand(num_tokens, stage.num_experts, generator=torch.Generator().manual_seed(num_tokens))
        weights_TK, experts_TK = order.topk(stage.num_experts_per_token)
        event = NeedExperts(self.module, hidden_TD, experts_TK.to(place), weights_TK.to(hidden_TD))
        batched = BatchedExperts(self.loaded, frozenset(), None, is_together=self.device.is_accelerator)
        flops = self._flops(num_tokens * stage.num_experts_per_token)
        return Timed(flops, lambda: batched.run(stage.index, [event]), self.device.finish)

    def _alone(self, num_rows: int) -> Timed:
        """Expert 0, which all tokens visit."""
        place, hidden_TD = self.device.torch_device, self._hidden(num_rows)
        visits = Visits(
            tokens_V=torch.arange(num_rows, device=place),
            experts_V=torch.zeros(num_rows, dtype=torch.int64, device=place),
            weights_V=torch.ones(num_rows, dtype=hidden_TD.dtype, device=place),
            ends=[num_rows],
        )

        def act() -> torch.Tensor:
            return mixed(self.module, hidden_TD, visits, [(0, bound_matrices(self.module, 0, self.paged))])

        return Timed(self._flops(num_rows), act, self.device.finish)


def on_cpu(loaded: LoadedModel, stage: Stage, host: torch.Tensor) -> Timed:
    """FLOPs of expert 0 of `stage`, whose bytes alone lie in `host`, as the CPU multiplies it beside an accelerator."""
    streamed = next(module for module in loaded.staged.modules if module.stage == stage.index)
    path, module = next((path, each) for path, each in streamed.inner.named_modules() if is_experts(each))
    expert = stage.expert(0)
    offsets = slot_layout(expert).tensor_offsets
    matrices = host_matrices(loaded, expert, host, offsets, prefix=f"{streamed.name}.{path}.")
    x_VD = torch.ones(HOST_ROWS, loaded.shape.hidden_size)
    work = stage_works(loaded.shape, frozenset())[stage.index]
    return Timed(2.0 * HOST_ROWS * work.expert_weights, lambda: multiplied_bare(module, matrices, 0, x_VD))
