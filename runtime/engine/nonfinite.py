"""Finds the module in which NaN or infinity first appeared, by rerunning the affected sequences."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import dataclass, replace

import torch
from greenlet import getcurrent

from ..cache.pages import num_pages_for
from ..errors import BrokenModelError
from ..events import Weights
from ..linear.stored import StoredWeight
from ..model.loading import LoadedModel
from ..model.stages import EMBEDDING, StreamedModule
from ..sequences.sequence import Sequence
from .batcher import Batcher, StaticBatcher
from .lanes.factory import LaneFactory
from .records import PassCounts
from .tables import GatheredWeight

MAX_EXPLAINED_PASSES = 16  # per session: many broken rows must not double a run's time


@dataclass(frozen=True, kw_only=True)
class NonFiniteSource:
    """The first module with a non-finite output. `tensors`: its weights that contain NaN or infinity. In float16 the
    cause may be overflow."""

    module: str
    stage: int
    tensors: tuple[str, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        weights = f", whose weights {', '.join(self.tensors)} hold NaN or infinity" if self.tensors else ""
        overflow = "; float16 overflows above 65,504: set model.dtype=float32" if self.dtype == torch.float16 else ""
        return f"first in the output of {self.module}{weights}{overflow}"

    @property
    def is_in_weights(self) -> bool:
        """True if broken weights affect every sequence; broken embedding rows affect only some."""
        return bool(self.tensors) and self.stage != EMBEDDING


def to_prompt_sequence(sequence: Sequence, *, has_encoder: bool) -> Sequence:
    """A new sequence with all known tokens as its prompt. With an encoder, only the original prompt: generated tokens
    cannot be prefilled."""
    known = sequence.request.prompt_ids if has_encoder else tuple(sequence.known_ids)
    return Sequence(request=replace(sequence.request, prompt_ids=known, max_new_tokens=1, num_beams=1))


class NonFiniteProbe:
    """Explains sequences that failed with non-finite logits. `step` runs the passes of a batcher."""

    def __init__(
        self,
        model: LoadedModel,
        lanes: LaneFactory,
        step: Callable[[Batcher], object],
        weights_of: Callable[[int], Weights],
    ):
        self._model, self._lanes, self._step, self._weights_of = model, lanes, step, weights_of
        self._num_explained, self._is_probing = 0, False

    def explain(self, groups: Rows[Rows[Sequence]], counts: PassCounts) -> None:
        """Reruns the broken sequences of a pass and appends the source to their errors. `groups`: the sequences of each
        lane; reruns use the same lanes. `counts`: those of the pass. Raises BrokenModelError if all sequences are
        broken and the weights must be the cause."""
        broken = [[s for s in group if s.is_broken] for group in groups]
        all_broken = [s for group in broken for s in group]
        if self._is_probing or not all_broken or self._num_explained >= MAX_EXPLAINED_PASSES:
            return
        self._num_explained += 1
        has_encoder = self._model.start_token_id is not None
        reruns = [[to_prompt_sequence(s, has_encoder=has_encoder) for s in group] for group in broken if group]
        # Reruns need pages of their own: the originals may have shared theirs with sequences that continue.
        needed_pages = sum(num_pages_for(s.num_known + 1) for group in reruns for s in group)
        has_room = not self._model.shape.is_packed or needed_pages <= self._lanes.num_free_pages
        sources = self._find_sources(reruns) if has_room else {}
        for sequence, copy in zip(all_broken, [s for group in reruns for s in group], strict=True):
            if (source := sources.get(id(copy))) is not None:
                sequence.error = f"{sequence.error}; {source}"
        all_failed = counts.useful_tokens == 0
        num_prompts = sum(1 for s in all_broken if s.request.num_beams == 1 or not s.request.sample_index)
        if all_failed and (num_prompts > 1 or any(origin.is_in_weights for origin in sources.values())):
            raise BrokenModelError(
                f"model.path={self._model.checkpoint.path}: all {len(all_broken)} rows of a pass have failed, the "
                f"first with: {all_broken[0].error}. Committed rows stay valid; repair or download the weights again"
            )

    def _find_sources(self, groups: Rows[Rows[Sequence]]) -> Mapping[int, NonFiniteSource]:
        """The source of each broken sequence, by `id()`. Hooks check the output of each streamed module."""
        lanes, sources = [self._lanes.lane(group) for group in groups], dict[int, NonFiniteSource]()

        def check_output(module: torch.nn.Module, inputs: object, output: object) -> None:
            assert isinstance(module, StreamedModule)
            hidden = output[0] if isinstance(output, tuple) else output
            lane = next((lane for lane in lanes if lane.is_running(getcurrent())), None)
            if lane is None or not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
                return
            rows = lane.marked_rows(~hidden.isfinite().all(-1))
            newly_broken = [
                s for s, is_broken in zip(lane.sequences, rows, strict=True) if is_broken and id(s) not in sources
            ]
            if newly_broken:
                tensors = tuple(_broken_weights(self._weights_of(module.stage), f"{module.name}."))
                source = NonFiniteSource(module=module.name, stage=module.stage, tensors=tensors, dtype=hidden.dtype)
                sources.update((id(sequence), source) for sequence in newly_broken)

        handles = [module.register_forward_hook(check_output) for module in self._model.staged.modules]
        self._is_probing = True
        try:
            with StaticBatcher(iter(lanes), num_lanes=len(lanes)) as batcher:
                while self._step(batcher) is not None:
                    pass
        finally:
            self._is_probing = False
            for handle in handles:
                handle.remove()
        return sources


def _broken_weights(weights: Weights, prefix: str) -> Iterator[str]:
    for name, weight in weights.items():
        if not name.startswith(prefix) or isinstance(weight, GatheredWeight):
            continue
        blocks = [weight]
        if isinstance(weight, StoredWeight):
            blocks = [block for entry in weight.entries for block in entry]
        plain = [block for block in blocks if isinstance(block, torch.Tensor) and block.dtype in FLOATS]
        if not all(bool(block.isfinite().all()) for block in plain):
            yield name


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
