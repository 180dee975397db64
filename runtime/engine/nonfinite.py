"""Where a row's numbers stopped being finite: looked for by a second pass over broken rows, once there are any."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from greenlet import getcurrent

from ..events import Weights
from ..linear.stored import StoredWeight
from ..model.stages import EMBEDDING, StreamedModule
from .lanes.lane import Lane
from .sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Origin:
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
        """For whatever row: of an embedding only some rows are used."""
        return bool(self.tensors) and self.stage != EMBEDDING


def repeated(sequence: Sequence, *, has_encoder: bool) -> Sequence:
    """What is known of it as a prompt; behind an encoder, where no answer can be prefilled, from its beginning."""
    known = sequence.request.prompt_ids if has_encoder else tuple(sequence.known_ids)
    return Sequence(request=replace(sequence.request, prompt_ids=known, max_new_tokens=1))


@dataclass(kw_only=True)
class Watch:
    """Looks at what each module gives while `lanes` pass them. `origins`: by the `id` of a sequence of theirs."""

    lanes: Rows[Lane]
    weights_of: Callable[[int], Weights]
    origins: dict[int, Origin] = field(default_factory=dict)

    @contextmanager
    def over(self, modules: Rows[StreamedModule]) -> Iterator[None]:
        handles = [module.register_forward_hook(self._look) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        assert isinstance(module, StreamedModule)
        hidden = output[0] if isinstance(output, tuple) else output
        lane = next((lane for lane in self.lanes if lane.is_running(getcurrent())), None)
        if lane is None or not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
            return
        rows = lane.rows_with(~hidden.isfinite().all(-1))
        news = [s for s, is_broken in zip(lane.sequences, rows, strict=True) if is_broken and id(s) not in self.origins]
        if news:
            tensors = tuple(_broken_weights(self.weights_of(module.stage), f"{module.name}."))
            for sequence in news:
                self.origins[id(sequence)] = Origin(
                    module=module.name, stage=module.stage, tensors=tensors, dtype=hidden.dtype
                )


def _broken_weights(weights: Weights, prefix: str) -> Iterator[str]:
    for name, weight in _under(weights, prefix).items():
        blocks = (
            [block for entry in weight.entries for block in entry] if isinstance(weight, StoredWeight) else [weight]
        )
        plain = [block for block in blocks if isinstance(block, torch.Tensor) and block.dtype in FLOATS]
        if not all(bool(block.isfinite().all()) for block in plain):
            yield name


def _under(weights: Weights, prefix: str) -> Mapping[str, torch.Tensor]:
    return {name: weight for name, weight in weights.items() if name.startswith(prefix)}


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
