"""Flash kernels are asked only for what they know; what they compute is tested on a double, and on a GPU."""

from typing import NamedTuple

import pytest
import torch

from runtime.attention import flash_attention
from runtime.attention.flash_attention import aligned, flash_applies, has_flash, knows_windows
from runtime.attention.rule import Rule

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
    return flash_applies(q, k, v, rule)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of the CUDA device that there seems to be."""
    found = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found[-1])
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(flash_attention, "has_flash", has_flash.__wrapped__)
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
    assert knows_windows()


def test_only_what_kernels_cannot_load_is_copied() -> None:
    numbers = torch.arange(4096, dtype=torch.bfloat16)
    heads = numbers.view(8, 8, 64)
    for fitting in (heads, heads.transpose(0, 1), heads[:, ::2], heads[..., 8:40]):
        assert aligned(fitting) is fitting
    for other in (numbers[4:].view(-1, 4)[: 4 * 64].view(4, 4, 64), heads.transpose(1, 2), heads[..., ::2]):
        found = aligned(other)
        assert torch.equal(found, other)
        assert found is not other
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0
