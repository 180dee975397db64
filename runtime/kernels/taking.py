"""Work that threads share inside of compiled code, so that they need the interpreter once and not for every piece."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import types
from numba.extending import intrinsic

from .attention_vectors import Builder, Value, place_of


@intrinsic
def _take(typing: Any, taken: Any, count: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        place = place_of(context, builder, taken, arguments[0], arguments[1].type(0))
        return builder.atomic_rmw("add", place, arguments[1], "monotonic")

    return types.intp(taken, types.intp), build


# Adds to the first number of `taken`, int64, and returns what it was: no two threads get the same.
take: Callable[[np.ndarray, int], int] = cast(Any, _take)
