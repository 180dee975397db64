"""Experts run once for all lanes that wait at them (MoE-Gen's module batching), with the stage's own weights or with
experts that are brought in one by one, of which the CPU may multiply some where they lie.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from ..events import NeedExperts
from ..model.expert_groups import in_host_memory, together
from ..model.experts import Experts, Matrices, Visits, added, bound_matrices, is_experts, mixed, output_of
from ..model.loading import LoadedModel
from ..model.split_experts import gathering_of, split_mixed
from ..model.whole_experts import mixed_among, own_experts
from ..stream.experts import ExpertStream
from .cpu_experts import CpuExperts, Errand


class BatchedExperts:
    """`stream` is open, and None where no stage is paged. `is_together`: experts that are there are run at once, as
    suits an accelerator. `cpu`: who multiplies some of them there, None: nobody. Only the engine calls it."""

    def __init__(
        self,
        loaded: LoadedModel,
        paged: frozenset[int],
        stream: ExpertStream | None,
        *,
        is_together: bool,
        cpu: CpuExperts | None = None,
    ):
        assert not paged or stream is not None, f"nothing brings in the experts of stages {sorted(paged)}"
        self._loaded, self._paged, self._stream, self._is_together = loaded, paged, stream, is_together
        self._cpu = cpu
        self._names = {
            module: f"{streamed.name}.{path}" if path else streamed.name
            for streamed in loaded.staged.modules
            for path, module in streamed.inner.named_modules()
            if is_experts(module)
        }

    def expect(self, stage: int) -> None:
        """The next `run` will be for this stage: call it as early as that is known."""
        if self._stream is not None and stage in self._paged:
            self._stream.expect(stage)

    def run(self, stage: int, asked: Sequence[NeedExperts]) -> list[torch.Tensor]:
        """The answers (T, D), in the order of `asked`: views of one tensor. All of `asked` name the same module, inside
        which their lanes are parked.

        Each expert that a token visits is used once, over its tokens of all lanes; a paged one is read once. Lanes that
        ask one at a time each read their own. A token's sum runs over its experts in ascending order, as in the plain
        version, so answers differ from it only by the shapes of products. Raises CheckpointError where a read fails.
        """
        module = asked[0].module
        assert all(each.module is module for each in asked), "lanes wait at different experts"
        hidden_TD, index_TK, weights_TK = _all_of(asked)
        is_divided = gathering_of(module) is not None
        is_together = self._is_together and not is_divided and stage not in self._paged
        out_TD = together(module, hidden_TD, index_TK, weights_TK) if is_together else None
        if out_TD is None:
            visits = Visits.sorted(index_TK, weights_TK, cast("Experts", module).num_experts)
            path, cpu = self._names[module], self._cpu
            errand = cpu.send(stage, module, path, hidden_TD, visits) if cpu is not None and not is_divided else None
            if cpu is None or errand is None:
                out_TD = self._mixed(stage, module, hidden_TD, visits)
            else:
                out_TD = self._shared(cpu, errand, hidden_TD, visits)
        return list(out_TD.split([len(each.hidden_TD) for each in asked]))

    def _mixed(self, stage: int, module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits) -> torch.Tensor:
        """The sum over each token's experts, of which other ranks may have some, or parts of each."""
        own = own_experts(module)
        if own is None:
            if gathering_of(module) is not None:
                return split_mixed(module, hidden_TD, visits, self._hit(stage, module, visits.hit))
            is_there = not self._is_together and stage not in self._paged
            found = in_host_memory(module, hidden_TD, visits) if is_there else None
            return mixed(module, hidden_TD, visits, self._hit(stage, module, visits.hit)) if found is None else found
        hit = [expert for expert in visits.hit if expert in own]
        return mixed_among(module, hidden_TD, visits, self._hit(stage, module, hit, first=own.start))

    def _shared(self, cpu: CpuExperts, errand: Errand, hidden_TD: torch.Tensor, visits: Visits) -> torch.Tensor:
        """The sum over each token's experts where the CPU multiplies those of the errand, in the same order."""
        stage, module = errand.stage, errand.module
        brought = [expert for expert in visits.hit if expert not in errand.experts]
        outputs = {
            expert: output_of(module, matrices, expert, hidden_TD, visits)
            for expert, matrices in self._hit(stage, module, brought)
        }
        outputs.update(cpu.outputs(errand))
        return added(hidden_TD, visits, ((expert, outputs[expert]) for expert in visits.hit))

    def _hit(
        self, stage: int, module: torch.nn.Module, hit: Sequence[int], first: int = 0
    ) -> Iterator[tuple[int, Matrices]]:
        """Matrices that are not paged, of a paged stage too, are those bound to the module, from expert `first` on."""
        if self._stream is None or stage not in self._paged:
            yield from ((expert, bound_matrices(module, expert - first)) for expert in hit)
            return
        prefix = f"{self._names[module]}."
        for found in self._stream.experts(stage, hit):
            placed = found.placed
            weights = self._loaded.weights_of(
                found.stage, placed.buffer, placed.tensor_offsets, on_device=self._is_together
            )
            paged = {name.removeprefix(prefix): weight[0] for name, weight in weights.items()}
            yield found.expert, bound_matrices(module, found.expert, instead=paged)


def _all_of(asked: Sequence[NeedExperts]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, experts and their weights of all tokens, lane by lane."""
    if len(asked) == 1:
        return asked[0].hidden_TD, asked[0].top_k_index_TK, asked[0].top_k_weights_TK
    return (
        torch.cat([each.hidden_TD for each in asked]),
        torch.cat([each.top_k_index_TK for each in asked]),
        torch.cat([each.top_k_weights_TK for each in asked]),
    )
