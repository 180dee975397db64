"""Flash kernels are asked only for what they know; what they compute is tested on a double, and on a GPU."""

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.attention import device_attention as module
from runtime.attention.device_attention import (
    align,
    can_use_flash,
    flash_attention,
    flash_operator,
    has_flash,
    has_window_size,
)
from runtime.attention.views import Rule, TokenRange, TokenRanges

CUDA, PLAIN = torch.device("cuda", 0), Rule(1.0)


class Like(NamedTuple):
    """What is looked at of a tensor on a GPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = CUDA


def applies(
    *,
    dims: tuple[int, int, int] = (128, 128, 128),
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    rule: Rule = PLAIN,
) -> bool:
    q = Like((4, 8, dims[0]), dtype)
    k, v = (Like((9, 16, 2, dim), kv_dtype or dtype) for dim in dims[1:])
    return can_use_flash(q, k, v, rule)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of the CUDA device that there seems to be."""
    found = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found[-1])
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(module, "has_flash", has_flash.__wrapped__)
    return found


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"dtype": torch.float16, "dims": (64, 64, 64)},
        {"dims": (192, 192, 128)},
        {"rule": Rule(1.0, sinks=torch.zeros(8))},
    ],
    ids=str,
)
def test_what_the_kernels_know_they_are_asked_for(asked: dict[str, object], capability: list[tuple[int, int]]) -> None:
    assert applies(**asked)
    capability.append((7, 5))
    assert not applies(**asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": torch.float32},
        {"kv_dtype": torch.float16},
        {"dims": (96, 96, 128)},
        {"dims": (320, 320, 320)},
        {"dims": (20, 20, 20)},
        {"rule": Rule(1.0, softcap=30.0)},
    ],
    ids=str,
)
def test_what_they_do_not_know_is_left_to_others(asked: dict[str, object], capability: list[tuple[int, int]]) -> None:
    assert not applies(**asked)


def test_a_device_that_is_not_cuda_has_none() -> None:
    assert not has_flash(torch.device("cpu"))


def test_this_torch_is_told_of_windows() -> None:
    assert has_window_size()


def test_only_what_kernels_cannot_load_is_copied() -> None:
    numbers = torch.arange(4096, dtype=torch.bfloat16)
    heads = numbers.view(8, 8, 64)
    for fitting in (heads, heads.transpose(0, 1), heads[:, ::2], heads[..., 8:40]):
        assert align(fitting) is fitting
    for other in (numbers[4:].view(-1, 4)[: 4 * 64].view(4, 4, 64), heads.transpose(1, 2), heads[..., ::2]):
        found = align(other)
        assert torch.equal(found, other)
        assert found is not other
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0


class _Kernels(TorchDispatchMode):
    """Takes the calls that would reach a device's kernels, and answers them with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, object]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "torch_attn":
            with self:
                return varlen._varlen_attn._init_fn(*args, **kwargs)  # the plain function behind the name
        if func is not torch.ops.aten._flash_attention_forward.default:
            return func(*args, **kwargs)
        names = [each.name for each in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.calls.append({name: _comparable(value) for name, value in given.items() if value is not None})
        query, empty = given["query"], torch.empty(0)
        return torch.zeros_like(query), query.new_zeros(query.shape[1], len(query), dtype=torch.float32), *[empty] * 3


def _comparable(value: object) -> object:
    return (value.data_ptr(), value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("sinks", [None, torch.ones(8)], ids=["plain", "sinks"])
@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("new", [(1, 1), (3, 1)], ids=["decode", "prompts"])
def test_the_operator_is_handed_what_torch_hands_it_by_its_documented_name(
    new: tuple[int, int],
    window: int | None,
    num_kv_heads: int,
    sinks: torch.Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = tuple(TokenRange(row, sum(new[:row]), count, 0, 5) for row, count in enumerate(new))
    spans = TokenRanges(parts, torch.device("cpu"))
    q, k, v = (
        torch.ones(count, heads, 64, dtype=torch.bfloat16)
        for count, heads in ((sum(new), 8), (10, num_kv_heads), (10, num_kv_heads))
    )
    assert flash_operator() is not None, "this torch's operator is not the one that is known"

    def called() -> tuple[list[dict[str, object]], torch.Tensor]:
        with _Kernels() as kernels:
            out = flash_attention(q, k, v, spans, window, Rule(0.125, sinks=sinks))
        return kernels.calls, out

    (direct,), out = called()
    monkeypatch.setattr(module, "flash_operator", lambda: None)
    (by_name,), other = called()
    assert direct == by_name
    assert torch.equal(out, other)


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("POSITIONAL_ARGUMENTS", module.POSITIONAL_ARGUMENTS[:-1]),
        ("KEYWORD_ARGUMENTS", {*module.KEYWORD_ARGUMENTS, "window"}),
    ],
)
def test_an_operator_that_takes_something_else_is_not_called(
    constant: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, constant, value)
    assert flash_operator.__wrapped__() is None
