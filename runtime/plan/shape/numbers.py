"""Type variables for scalars or NumPy arrays: one formula serves a single plan and a whole grid of policies."""

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Numbers = TypeVar("Numbers", float, Floats)  # the same type throughout one call


def larger(one: float, other: Numbers) -> Numbers:
    """Returns the larger of two values, elementwise for arrays."""
    return np.maximum(one, other) if isinstance(other, np.ndarray) else max(one, other)
