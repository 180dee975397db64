"""How far a measurement is: a bar on a terminal, nothing elsewhere."""

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm


class Steps:
    """A context manager; `advance` after each step."""

    def __enter__(self) -> Self:
        self._bar = tqdm(unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self, name: str, total: int) -> None:
        self._bar.total = total
        self._bar.set_description(name, refresh=False)
        self._bar.update()
