"""Pages of quantised keys and values: what they hold, how far it is from what was computed, and how many bytes."""

import pytest
import torch

from runtime.attention.page_codes import PageFormat, cast_to_compute, cast_to_stored
from runtime.config.settings import KVDType
from runtime.plan.shape.dtypes import PAGE_TOKENS, page_parts

QUANTIZED = [KVDType.int8, KVDType.int4]
STEPS = {KVDType.int8: 127, KVDType.int4: 7.5}  # levels on each side of a channel's middle


def pages(seed: int, *, num: int = 3, heads: int = 2, dims: tuple[int, int] = (16, 32)) -> list[torch.Tensor]:
    """Keys whose channels are of many sizes, values whose positions are."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(num, PAGE_TOKENS, heads, dim, generator=generator) for dim in dims)
    return [
        k * torch.logspace(-3, 3, dims[0])[None, None, None],
        v * torch.logspace(-3, 3, PAGE_TOKENS)[None, :, None, None],
    ]


def there_and_back(kv_dtype: KVDType, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    page_format = PageFormat(kv_dtype, k.shape[2], k.shape[3], v.shape[3])
    encoded = page_format.encode(k, v)
    assert encoded.shape == (len(k), page_format.page_bytes)
    return page_format.decode(encoded, torch.float32)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_no_number_is_further_off_than_half_a_step_of_its_own_scale(kv_dtype: KVDType) -> None:
    k, v = pages(0)
    for x, found, dim in zip((k, v), there_and_back(kv_dtype, k, v), (1, 3), strict=True):
        far = x.abs().amax(dim, keepdim=True) / 127
        reach = far if kv_dtype is KVDType.int8 else torch.maximum(far, (x.amax(dim, True) - x.amin(dim, True)) / 15)
        assert ((x - found).abs() <= 0.51 * reach + 2**-8 * x.abs()).all()
        assert (x - found).abs().amax() > 0


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_channel_far_from_zero_keeps_its_levels(kv_dtype: KVDType) -> None:
    k, v = pages(1)
    k = 100 + k.sign()
    found, _ = there_and_back(kv_dtype, k, v)
    assert (found - k).abs().amax() <= 0.5


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_pages_of_zeros_stay_zeros_and_bytes_of_zeros_are_zeros(kv_dtype: KVDType) -> None:
    page_format = PageFormat(kv_dtype, 2, 16, 16)
    zeros = torch.zeros(1, PAGE_TOKENS, 2, 16)
    assert not any(x.any() for x in there_and_back(kv_dtype, zeros, zeros))
    assert not any(
        x.any() for x in page_format.decode(torch.zeros(1, page_format.page_bytes, dtype=torch.uint8), torch.float32)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_what_is_not_finite_comes_back_not_finite(kv_dtype: KVDType, bad: float) -> None:
    k, v = pages(2)
    k[1, 5, 1, 3] = v[1, 5, 1, 3] = bad
    back_k, back_v = there_and_back(kv_dtype, k, v)
    assert not back_k[1, :, 1, 3].isfinite().any()
    assert not back_v[1, 5, 1].isfinite().any()
    assert back_k[0].isfinite().all() and back_v[0].isfinite().all()  # noqa: PT018 - one law


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_page_is_the_same_in_whichever_batch_it_is_quantised(kv_dtype: KVDType) -> None:
    k, v = pages(3, num=5)
    page_format = PageFormat(kv_dtype, 2, 16, 32)
    together = page_format.encode(k, v)
    assert all(torch.equal(together[i : i + 1], page_format.encode(k[i : i + 1], v[i : i + 1])) for i in range(5))


def test_float8_rounds_each_number_and_ends_at_its_largest() -> None:
    x = torch.tensor([0.0, 1.0, -1.06, 1e-4, 448.0, 1e6, -1e6])
    found = cast_to_compute(cast_to_stored(x, torch.uint8), torch.float32)
    assert found.tolist()[-3:] == [448.0, 448.0, -448.0]
    assert ((found - x).abs()[:4] <= x.abs()[:4] / 16 + 2**-10).all()


@pytest.mark.parametrize(("kv_dtype", "share"), [(KVDType.int8, 0.535), (KVDType.int4, 0.303)])
def test_bytes_are_the_promised_share_of_those_of_bfloat16(kv_dtype: KVDType, share: float) -> None:
    """8 heads of 128, as in Llama 3."""
    parts = page_parts(kv_dtype, 8, 128, 128)
    assert sum(parts) == parts.page_bytes
    assert parts.page_bytes / (PAGE_TOKENS * 2 * 8 * 128 * 2) == pytest.approx(share, abs=5e-4)
