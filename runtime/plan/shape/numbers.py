"""Numbers, or arrays of them: a term that takes either serves one plan and a whole grid of policies."""

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Numbers = TypeVar("Numbers", float, Floats)  # of one call all alike
