"""Types for formulas that take a float for one plan, or a NumPy array for a whole grid of policies."""

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Numbers = TypeVar("Numbers", float, Floats)  # all values of one call have the same type


def larger(one: float, other: Numbers) -> Numbers:
    """Returns the larger of two values; elementwise if `other` is an array."""
    return np.maximum(one, other) if isinstance(other, np.ndarray) else max(one, other)
