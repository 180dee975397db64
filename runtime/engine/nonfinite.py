"""Where a row's numbers stopped being finite: looked for by a second pass over broken rows, once there are any."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Rows
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

MAX_EXPLAINED_PASSES = 16  # passes of a session: a run of many broken rows shall not take twice its time


@dataclass(frozen=True, kw_only=True)
class NonFiniteSource:
    """The first module that a number that is not finite comes out of; `tensors`: its weights that hold one. Numbers in
    float16 may have been too large for it."""

    module: str
    stage: int
    tensors: tuple[str, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        held = f", whose {', '.join(self.tensors)} holds NaN or infinity" if self.tensors else ""
        larger = (
            "; float16 ends at 65,504: model.dtype=float32 has room for more" if self.dtype == torch.float16 else ""
        )
        return f"the first such number comes out of {self.module}{held}{larger}"

    @property
    def is_in_weights(self) -> bool:
        """Whether any row would meet it: of an embedding only some rows are used."""
        return bool(self.tensors) and self.stage != EMBEDDING


def to_prompt_sequence(sequence: Sequence, *, has_encoder: bool) -> Sequence:
    """What is known of it as a prompt; behind an encoder, where no answer can be prefilled, from its beginning."""
    known = sequence.request.prompt_ids if has_encoder else tuple(sequence.known_ids)
    return Sequence(request=replace(sequence.request, prompt_ids=known, max_new_tokens=1, num_beams=1))


class NonFiniteProbe:
    """Says of rows without finite numbers where these began. `step` runs the passes of a batcher."""

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
        """Runs the rows of a pass that gave no finite numbers once more, in as many lanes as they had, and adds what it
        finds to their errors. `groups` are the sequences that were in the pass's lanes, `counts` what it came to.

        Raises BrokenModelError where all rows of the pass are broken, and the weights must be why.
        """
        broken = [[s for s in group if s.is_broken] for group in groups]
        all_broken = [s for group in broken for s in group]
        if self._is_probing or not all_broken or self._num_explained >= MAX_EXPLAINED_PASSES:
            return
        self._num_explained += 1
        has_encoder = self._model.start_token_id is not None
        again = [[to_prompt_sequence(s, has_encoder=has_encoder) for s in group] for group in broken if group]
        # There must be pages for all of them, each by itself: they may have shared theirs with rows that go on.
        wanted = sum(num_pages_for(s.num_known + 1) for group in again for s in group)
        has_room = not self._model.shape.is_packed or wanted <= self._lanes.num_free_pages
        origins = self._find_sources(again) if has_room else {}
        for sequence, copy in zip(all_broken, [s for group in again for s in group], strict=True):
            if (origin := origins.get(id(copy))) is not None:
                sequence.error = f"{sequence.error}; {origin}"
        is_total = counts.useful_tokens == 0
        num_prompts = sum(1 for s in all_broken if s.request.num_beams == 1 or not s.request.sample_index)
        if is_total and (num_prompts > 1 or any(origin.is_in_weights for origin in origins.values())):
            raise BrokenModelError(
                f"model.path={self._model.checkpoint.path}: all {len(all_broken)} rows of a pass have failed, the "
                f"first with: {all_broken[0].error}. What is committed stays good; mend the weights, or fetch them anew"
            )

    def _find_sources(self, groups: Rows[Rows[Sequence]]) -> Mapping[int, NonFiniteSource]:
        """Where each row's numbers began, by its `id`: looks at what each module gives while lanes pass them."""
        lanes, found = [self._lanes.lane(group) for group in groups], dict[int, NonFiniteSource]()

        def look(module: torch.nn.Module, inputs: object, output: object) -> None:
            assert isinstance(module, StreamedModule)
            hidden = output[0] if isinstance(output, tuple) else output
            lane = next((lane for lane in lanes if lane.is_running(getcurrent())), None)
            if lane is None or not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
                return
            rows = lane.marked_rows(~hidden.isfinite().all(-1))
            news = [s for s, is_broken in zip(lane.sequences, rows, strict=True) if is_broken and id(s) not in found]
            if news:
                tensors = tuple(_broken_weights(self._weights_of(module.stage), f"{module.name}."))
                origin = NonFiniteSource(module=module.name, stage=module.stage, tensors=tensors, dtype=hidden.dtype)
                found.update((id(sequence), origin) for sequence in news)

        handles = [module.register_forward_hook(look) for module in self._model.staged.modules]
        self._is_probing = True
        try:
            with StaticBatcher(iter(lanes), num_lanes=len(lanes)) as batcher:
                while self._step(batcher) is not None:
                    pass
        finally:
            self._is_probing = False
            for handle in handles:
                handle.remove()
        return found


def _broken_weights(weights: Weights, prefix: str) -> Iterator[str]:
    for name, weight in weights.items():
        if not name.startswith(prefix):
            continue
        blocks = [weight]
        if isinstance(weight, StoredWeight):
            blocks = [block for entry in weight.entries for block in entry]
        plain = [block for block in blocks if isinstance(block, torch.Tensor) and block.dtype in FLOATS]
        if not all(bool(block.isfinite().all()) for block in plain):
            yield name


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
