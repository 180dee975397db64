"""Makes the double launch what a device would, where the CPU has kernels of its own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from runtime.attention.host_attention import decode_attention_torch
from runtime.linear import backends, packed_rows
from runtime.model import attention, fused_ops, loading
from runtime.plan.shape.shapes import Parameter
from runtime.weights import stage_weights as weights


@contextmanager
def operators_of_a_device() -> Iterator[None]:
    """Within it what looks for a CPU's kernels finds none, so that the double launches what a device would."""

    def plain(tensor: torch.Tensor, parameter: Parameter, dtype: torch.dtype, *rest: Any) -> torch.Tensor | None:
        if tensor.dtype == dtype or not tensor.is_floating_point():
            return tensor.view(parameter.shape)
        return make_plain_weight(tensor, parameter, dtype, *rest)

    def decode(*given: Any) -> torch.Tensor:
        return decode_attention_torch(*given[:-1])  # no number of threads

    make_plain_weight = weights._make_plain_weight
    with ExitStack() as stack:
        for module, name, value in (
            (fused_ops, "has_compiler", lambda: False),
            (fused_ops, "can_compile", lambda: False),
            (loading, "can_compile", lambda: False),
            (backends, "has_compiler", lambda: False),
            (packed_rows, "has_compiler", lambda: False),
            (backends, "has_matrix_unit", lambda: False),
            (weights, "_make_plain_weight", plain),
            (attention, "decode_attention", decode),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield
