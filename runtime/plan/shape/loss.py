"""What a way of storing does to numbers: three classes of error, and what those of a model's weights come to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from .model import ModelShape
from .shapes import TensorSlice


class Loss(Enum):
    """What a format does to numbers. `exact`: they are what its definition makes of the published bytes. `lossless`:
    they are the original's, bit by bit. `lossy`: they are the original's, rounded."""

    exact = "exact"
    lossless = "lossless"
    lossy = "lossy"


ORDER = (Loss.exact, Loss.lossless, Loss.lossy)
MEANING = {
    Loss.exact: "exact to the published numbers",
    Loss.lossless: "lossless, bit by bit the published numbers",
}


@dataclass(frozen=True, kw_only=True)
class StoredNumbers:
    """How the matrices of a model are stored. `formats`: storage formats, and dtypes of plain ones, by their bytes, the
    most first; `loss` is the worst of theirs. `relative_error`: the root of the squares of what weights are off by, of
    those that were rounded, as a share of their own; None where nobody measured it, or nothing is off."""

    formats: tuple[str, ...]
    loss: Loss
    relative_error: float | None = None

    @staticmethod
    def of(shape: ModelShape, losses: Mapping[str, Loss], relative_error: float | None = None) -> "StoredNumbers":
        """`losses`: the class of each format that is no dtype."""
        num_bytes = dict[str, int]()
        for piece in {piece.name: piece for piece in _matrices(shape)}.values():
            name = piece.format or piece.dtype
            num_bytes[name] = num_bytes.get(name, 0) + piece.num_bytes
        formats = sorted(num_bytes, key=lambda name: -num_bytes[name])
        found = [losses.get(name, Loss.exact) for name in formats]
        loss = max(found, key=ORDER.index, default=Loss.exact)
        return StoredNumbers(
            formats=tuple(formats), loss=loss, relative_error=relative_error if loss is Loss.lossy else None
        )

    def __str__(self) -> str:
        return f"{self.names}: {self.meaning}"

    @property
    def names(self) -> str:
        return ", ".join(self.formats)

    @property
    def meaning(self) -> str:
        if self.loss is not Loss.lossy:
            return MEANING[self.loss]
        error = "not measured" if self.relative_error is None else f"{self.relative_error:.2%}"
        return f"lossy, relative RMS error {error}"


def _matrices(shape: ModelShape) -> Iterator[TensorSlice]:
    for parameter in (p for stage in shape.stages for p in stage.parameters):
        for piece in (piece for entry in parameter.pieces for piece in entry):
            if len(piece.shape) > 1:
                yield piece
