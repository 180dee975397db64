"""What the passes of a run are mostly like: of what a machine is measured for it."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ..placement.memory import MicroBatch, pass_tokens
from ..shape.model import ModelShape
from .lane_work import Piece

MEASURED_ROWS = (1, 16, 64, 128, 256, 512)  # of products; short lanes, and where the product's own code changes


@dataclass(frozen=True, kw_only=True)
class TypicalLoad:
    """What the lanes of a block have: most tokens in a prefill pass, rows that decode, and what a row has."""

    chunk_tokens: int
    num_rows: int
    num_prompt_tokens: int  # of a prompt
    num_positions: int  # that a row looks at in the middle of its answer

    @staticmethod
    def of(shape: ModelShape, lanes: Sequence[MicroBatch], prefill_chunk_tokens: int) -> "TypicalLoad":
        sizes = [size for lane in lanes for size in lane]
        num_prompt = sum(size.num_prompt_tokens for size in sizes) // max(1, len(sizes))
        num_new = sum(size.max_new_tokens for size in sizes) // max(1, len(sizes))
        return TypicalLoad(
            chunk_tokens=max([1, *(pass_tokens(shape, lane, prefill_chunk_tokens) for lane in lanes)]),
            num_rows=max([1, *map(len, lanes)]),
            num_prompt_tokens=max(1, num_prompt),
            num_positions=max(1, num_prompt + num_new // 2),
        )

    def covers(self, other: "TypicalLoad") -> bool:
        """Whether what was measured for this load tells of the other: where nothing in it is more than twice as large.
        Smaller sizes are among those that are measured."""
        ours, theirs = astuple(self), astuple(other)
        return all(b <= 2 * a for a, b in zip(ours, theirs, strict=True))

    @property
    def product_rows(self) -> list[int]:
        """Ascending; nothing in the run has more than the last."""
        most = max(self.chunk_tokens, self.num_rows)
        return sorted({rows for rows in (*MEASURED_ROWS, self.chunk_tokens, self.num_rows) if rows <= most})

    def passes(self, position_bytes: int, most_bytes: int) -> list[list[Piece]]:
        """What a packed lane carries in a decode pass in the middle of the answers, and in a prefill pass whose prompts
        are whole; shorter where the keys and values of a layer, at `position_bytes` each, would take more than
        `most_bytes`."""
        most = max(1, most_bytes // position_bytes)
        chunk, prompt = min(self.chunk_tokens, most), self.num_prompt_tokens
        prompts = [min(prompt, chunk - begin) for begin in range(0, chunk, prompt)]
        num_rows = min(self.num_rows, most)
        past = max(1, min(self.num_positions, most // num_rows) - 1)
        return [
            [Piece(past=past, new=1, num_selected=1)] * num_rows,
            [Piece(past=0, new=new, num_selected=1) for new in prompts],
        ]
