"""Flash kernels are asked only for what they know; what they compute is tested on a GPU, in test_gpu.py."""

from typing import NamedTuple

import pytest
import torch

from runtime.cache.flash_attention import flash_applies, takes_pages
from runtime.cache.views import Reach
from runtime.plan.memory import PAGE_TOKENS


class Device(NamedTuple):
    type: str


class Like(NamedTuple):
    """What is looked at of a tensor on a GPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: Device = Device("cuda")


def applies(
    *,
    page_tokens: int = 256,
    dims: tuple[int, int, int] = (128, 128, 128),
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    device: str = "cuda",
    reach: Reach | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    activated: str | None = None,
) -> bool:
    q = Like((4, 8, dims[0]), dtype, Device(device))
    k, v = (Like((9, page_tokens, 2, dim), kv_dtype or dtype, Device(device)) for dim in dims[1:])
    return flash_applies(q, k, v, reach=reach or Reach(), softcap=softcap, has_sinks=has_sinks, activated=activated)


def test_what_the_kernels_know_they_are_asked_for() -> None:
    assert applies()
    assert applies(dtype=torch.float16, page_tokens=512, reach=Reach(window=9), dims=(64, 64, 64))
    assert applies(page_tokens=PAGE_TOKENS, activated="FA3")


def test_pages_of_ours_are_too_small_for_the_kernels_that_torch_brings_along() -> None:
    assert not applies(page_tokens=PAGE_TOKENS)


@pytest.mark.parametrize(
    "asked",
    [
        {"device": "cpu"},
        {"dtype": torch.float32},
        {"kv_dtype": torch.float16},
        {"page_tokens": 128},
        {"dims": (96, 96, 64)},
        {"dims": (320, 320, 320)},
        {"dims": (20, 20, 20)},
        {"softcap": 30.0},
        {"has_sinks": True},
        {"reach": Reach(chunk=64)},
        {"activated": "FA4"},
    ],
    ids=str,
)
def test_what_they_do_not_know_is_left_to_torch_operators(asked: dict[str, object]) -> None:
    assert not applies(**asked)


def test_this_torch_takes_page_tables() -> None:
    assert takes_pages()
