"""Numbers, or arrays of them: a term that takes either serves one plan and a whole grid of policies."""

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Numbers = TypeVar("Numbers", float, Floats)  # of one call all alike


def larger(one: float, other: Numbers) -> Numbers:
    """The larger of two, of an array number by number."""
    return np.maximum(one, other) if isinstance(other, np.ndarray) else max(one, other)
