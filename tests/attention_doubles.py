"""Attention operators that ask on a CPU for what they ask for on an accelerator, or that refuse what is slow there."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import AuxRequest

from runtime.attention import device_attention as flash_attention
from tests.fake_recording import Tape
from tests.host_counters import mark, on_device

_SCALED = F.scaled_dot_product_attention


def scaled_without_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` but for what only its plain backend takes on a CUDA device, where it makes
    scores in float32: grouped heads with a mask, or at all where there are no flash kernels, heads whose numbers do not
    lie side by side, and of sizes that kernels do not load."""
    assert not (enable_gqa and attn_mask is not None), "a mask with grouped heads takes the plain backend on a device"
    assert not enable_gqa, "grouped heads take the plain backend on a device without flash kernels"
    assert all(each.shape[-1] % 8 == 0 for each in (query, key, value)), "heads of no multiple of 8 numbers"
    assert all(each.stride(-1) == 1 for each in (query, key, value)), "numbers of a head lie apart"
    return _SCALED(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def refuse_groups(patch: pytest.MonkeyPatch) -> None:
    """For tests on an accelerator made of host memory."""
    patch.setattr(F, "scaled_dot_product_attention", scaled_without_groups)


class FlashCall(NamedTuple):
    num_sequences: int
    window_size: tuple[int, int]


class FlashDouble:
    """`varlen_attn` in plain operators, which asserts what the kernels of FlashAttention-2 check, and that they could
    load what they are handed. `calls` are those made so far."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]):
        self._dtypes = dtypes
        self.has_room = False  # whether keys may lie behind those that anybody looks at
        self.calls: list[FlashCall] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: AuxRequest | None = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out, sums = torch.empty_like(query), torch.empty(query.shape[1], len(query))
        tape = Tape.current
        with Tape.paused():  # it is one launch
            self._check(query, key, value, enable_gqa=enable_gqa)
            q_bounds = _bounds(cu_seq_q, len(query), max_q)
            k_bounds = _bounds(cu_seq_k, len(key), max_k, has_room=self.has_room)
            assert len(q_bounds) == len(k_bounds) > 1, "as many runs of keys as of queries, and one at least"
            self.calls.append(FlashCall(len(q_bounds) - 1, window_size))
            if on_device(query):
                mark(out)
                mark(sums)

            def work() -> None:
                bounds = (pairwise(each.clone().tolist()) for each in (cu_seq_q, cu_seq_k))
                for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
                    tokens = slice(q0, q1)
                    out[tokens], sums[:, tokens] = _one(
                        query[tokens], key[k0:k1], value[k0:k1], scale or query.shape[-1] ** -0.5, window_size
                    )

            work()
            if tape is not None:
                tape.add(work)
            return (out, sums) if return_aux is not None and return_aux.lse else out

    def operator(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor,
        cum_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """What `varlen_attn` calls."""
        assert window_size_left is not None, "the operator makes no window of None"
        assert window_size_right is not None, "the operator makes no window of None"
        window = (window_size_left, window_size_right)
        assert (dropout_p, is_causal, return_debug_mask) == (0.0, window == (-1, 0), False)
        found = self(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k,
            scale=scale, window_size=window, return_aux=AuxRequest(lse=True), enable_gqa=True,
        )  # fmt: skip
        return (*found, query.new_empty(0), query.new_empty(0), query.new_empty(0))

    def _check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool) -> None:
        num_heads, head_dim = query.shape[1:]
        assert query.dim() == key.dim() == 3, f"queries {query.shape}, keys {key.shape}"
        assert query.dtype in self._dtypes, f"no kernel for {query.dtype}"
        assert query.dtype == key.dtype == value.dtype, f"{query.dtype}, {key.dtype}, {value.dtype}"
        assert key.shape == value.shape == (len(key), key.shape[1], head_dim), f"keys {key.shape}, values {value.shape}"
        assert num_heads % key.shape[1] == 0, f"{num_heads} query heads of {key.shape[1]} KV heads"
        assert enable_gqa or num_heads == key.shape[1], "heads are grouped, which it was not told"
        assert head_dim <= 256, f"a head of {head_dim}"
        assert head_dim % 8 == 0, f"a head of {head_dim}"
        for name, tensor in {"queries": query, "keys": key, "values": value}.items():
            assert tensor.stride(-1) == 1, f"{name} have strides {tensor.stride()}"
            assert tensor.data_ptr() % 16 == 0, f"{name} begin at {tensor.data_ptr() % 16} mod 16"
            steps = [stride * tensor.itemsize % 16 for stride in tensor.stride()[:-1]]
            assert not any(steps), f"rows or heads of {name} begin at {steps} mod 16"


def _bounds(cumulated: torch.Tensor, total: int, most: int, *, has_room: bool = False) -> list[int]:
    assert cumulated.dtype == torch.int32, f"bounds are {cumulated.dtype}"
    assert cumulated.is_contiguous(), f"bounds have strides {cumulated.stride()}"
    found = cumulated.clone().tolist()  # which is the double's, and no wait
    lengths = [end - begin for begin, end in pairwise(found)]
    assert found[0] == 0, f"bounds {found}"
    assert found[-1] <= total if has_room else found[-1] == total, f"bounds {found} of {total}"
    assert min(lengths) > 0, f"bounds {found}"
    assert max(lengths) <= most if has_room else max(lengths) == most, (
        f"the longest is {max(lengths)}, it was told {most}"
    )
    return found


def _one(
    q_THD: torch.Tensor, k_SHD: torch.Tensor, v_SHD: torch.Tensor, scale: float, window: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, whose last query stands at its last key; and the logarithms of its sums (H, T)."""
    group = q_THD.shape[1] // k_SHD.shape[1]
    q, k, v = (
        each.repeat_interleave(times, 1).float().transpose(0, 1)
        for each, times in ((q_THD, 1), (k_SHD, group), (v_SHD, group))
    )
    at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    ahead = torch.arange(k.shape[1]) - at
    left, right = (width if width >= 0 else k.shape[1] for width in window)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill((ahead > right) | (-ahead > left), float("-inf"))
    sums = scores.logsumexp(-1)
    return ((scores - sums[..., None]).exp() @ v).transpose(0, 1).to(q_THD.dtype), sums


def install_flash(
    patch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, ...] = (), *, by_operator: bool = True
) -> FlashDouble:
    """From now on flash kernels are found, of these dtypes beside their own, by torch's operator or by the name that it
    documents."""
    kernels = (*flash_attention.KERNEL_DTYPES, *dtypes)
    double = FlashDouble(kernels)
    patch.setattr(flash_attention, "KERNEL_DTYPES", kernels)
    patch.setattr(flash_attention, "has_flash", lambda device: True)
    patch.setattr(flash_attention, "varlen_attn", lambda: double)
    patch.setattr(flash_attention, "flash_operator", lambda: double.operator if by_operator else None)
    flash_attention._gqa_options.cache_clear()
    return double
