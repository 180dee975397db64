"""Blocks that are being generated: a part is committed once its last row is there, and a pass goes into the part that
is committed next, and into no other."""

from collections.abc import Sequence

from runtime.batching.balance import Block

from .output_rows import GenerationRow
from .parts import PartStore
from .passes import PassRow
from .running import RequestKey


class OpenParts:
    """The rows of the parts that lack some, and the passes that no part has yet."""

    def __init__(self, store: PartStore, blocks: Sequence[Block]):
        self._store = store
        # Earlier starts inside these blocks, for their parts to say; 0 where every part may have some.
        self.num_stops = 0
        self._block_of = {request.key: block.index for block in blocks for request in store.blocks[block.index]}
        self._num_missing = {block.index: len(store.blocks[block.index]) for block in blocks}
        self._complete: list[int] = []
        self.rows: dict[RequestKey, GenerationRow] = {}
        self.passes: list[PassRow] = []

    def __len__(self) -> int:
        return len(self._num_missing)

    def add(self, row: GenerationRow) -> None:
        """Each row once."""
        assert row.key not in self.rows, f"{row.key} was added before"
        self.rows[row.key] = row
        block = self._block_of[row.key]
        self._num_missing[block] -= 1
        if not self._num_missing[block]:
            self._complete.append(block)

    def commit_complete(self) -> list[int]:
        """Commits the parts that lack no row; returns their blocks. Raises OutputError."""
        complete = sorted(self._complete)
        for block in complete:
            keys = [request.key for request in self._store.blocks[block]]
            if self._store.commit(block, [self.rows[key] for key in keys], self.passes, num_stops=self.num_stops):
                self.passes = []
            for key in keys:
                del self.rows[key]
            del self._num_missing[block]
        self._complete = []
        return complete
