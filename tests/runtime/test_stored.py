"""A stored weight acts as the widened tensor would, in every product and in any other operation."""

import pytest
import torch
import torch.nn.functional as F

from runtime.linear import blocks as panels
from runtime.linear.stored import StoredWeight

pytestmark = pytest.mark.usefixtures("two_threads")

STORED = (torch.bfloat16, torch.float16, torch.float32)
NUM_ROWS = (1, 2, 31, 95, 96, 97, 128, 200)
K, N = 48, 80


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several panels even for tiny weights, the last one shorter."""
    monkeypatch.setattr(panels, "PANEL_BYTES", 7 * K * 4)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(
    dtype: torch.dtype, heights: tuple[int, ...] = (N,), compute: torch.dtype = torch.float32
) -> StoredWeight:
    blocks = [rand(height, K, dtype=dtype, seed=n) for n, height in enumerate(heights)]
    return StoredWeight([blocks], (sum(heights), K), compute, is_stacked=False)


def close(found: object, expected: torch.Tensor) -> None:
    assert isinstance(found, torch.Tensor)
    assert not isinstance(found, StoredWeight)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("heights", [(N,), (32, 48), (1, 78, 1)], ids=str)
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_linear(num_rows: int, dtype: torch.dtype, heights: tuple[int, ...], has_bias: bool) -> None:
    weight, x = weight_of(dtype, heights), rand(num_rows, K, seed=9)
    bias = rand(N, seed=5) if has_bias else None
    close(F.linear(x, weight, bias), F.linear(x, weight.dequantized(), bias))


@pytest.mark.parametrize("shape", [(K,), (1, 1, K), (2, 3, K), (4, 50, K), (0, K)], ids=str)
def test_linear_keeps_leading_dimensions(shape: tuple[int, ...]) -> None:
    weight, x, bias = weight_of(torch.bfloat16), rand(*shape, seed=9), rand(N, seed=5)
    close(F.linear(x, weight, bias), F.linear(x, weight.dequantized(), bias))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_linear_takes_inputs_that_are_not_contiguous(num_rows: int) -> None:
    weight, x = weight_of(torch.bfloat16), rand(K, num_rows, seed=9).t()
    close(F.linear(x, weight), F.linear(x, weight.dequantized()))


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16], ids=str)
def test_linear_in_half_precision(compute: torch.dtype) -> None:
    weight, x = weight_of(torch.float32, compute=compute), rand(4, K, dtype=compute, seed=9)
    found = F.linear(x, weight)
    assert found.dtype is compute
    torch.testing.assert_close(found, F.linear(x, weight.dequantized()), atol=0.2, rtol=0.02)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_addmm_of_conv1d(num_rows: int, dtype: torch.dtype) -> None:
    """Conv1D's weight is (in, out): the panels run over the input."""
    weight, x, bias = weight_of(dtype, (32, 48)), rand(num_rows, N, seed=9), rand(K, seed=5)
    close(torch.addmm(bias, x, weight), torch.addmm(bias, x, weight.dequantized()))


@pytest.mark.parametrize("heights", [(N,), (32, 48)], ids=str)
def test_embedding_widens_only_what_it_looks_up(heights: tuple[int, ...]) -> None:
    weight, ids = weight_of(torch.bfloat16, heights), torch.tensor([[0, 5], [79, 5]])
    close(F.embedding(ids, weight), F.embedding(ids, weight.dequantized()))


@pytest.mark.parametrize("index", [0, 2, -1, torch.tensor(1)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 97, 200])
def test_experts_of_several_blocks(num_rows: int, index: int | torch.Tensor) -> None:
    entries = [[rand(32, K, dtype=torch.bfloat16, seed=2 * e + b) for b in range(2)] for e in range(3)]
    weight = StoredWeight(entries, (3, 64, K), torch.float32, is_stacked=True)
    x = rand(num_rows, K, seed=9)
    expert = weight[index]
    assert isinstance(expert, StoredWeight)
    close(F.linear(x, expert), F.linear(x, weight.dequantized()[index]))


@pytest.mark.parametrize("index", [0, 79, -80, torch.tensor(3)], ids=str)
@pytest.mark.parametrize("heights", [(N,), (32, 48)], ids=str)
def test_a_row(heights: tuple[int, ...], index: int | torch.Tensor) -> None:
    weight = weight_of(torch.bfloat16, heights)
    close(weight[index], weight.dequantized()[index])
    with pytest.raises(IndexError):
        weight[N]


OTHER = {
    "matmul": lambda w: rand(3, K) @ w.t(), "sum": lambda w: w.sum(0), "mul": lambda w: w * 2.0,
    "slice": lambda w: w[1:3],
    "cat": lambda w: torch.cat([w, w]), "to": lambda w: w.to(torch.float64),
    "einsum": lambda w: torch.einsum("nk->kn", w),
    "view": lambda w: w.view(-1), "view of groups": lambda w: w.view(4, -1, K),
    "view of any": lambda w: w.view(-1, 8, K), "view of two": lambda w: w.view(2, 40, -1), "clone": lambda w: w.clone(),
    "masked": lambda w: w[torch.tensor([0, 3])],
    "float64 linear": lambda w: F.linear(rand(2, K, dtype=torch.float64), w.to(torch.float64)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_any_other_operation_sees_the_widened_tensor(name: str) -> None:
    weight = weight_of(torch.bfloat16, (32, 48))
    close(OTHER[name](weight), OTHER[name](weight.dequantized()))


def test_it_looks_like_the_parameter_it_stands_for() -> None:
    weight = weight_of(torch.bfloat16)
    assert (weight.shape, weight.dtype, weight.device.type, weight.dim()) == ((N, K), torch.float32, "cpu", 2)


def test_new_bytes_under_a_weight_are_seen_at_once() -> None:
    """A slot's views outlive its contents: nothing of a product may be kept."""
    weight, x = weight_of(torch.bfloat16), rand(2, K, seed=9)
    F.linear(x, weight)
    weight.entries[0][0].copy_(rand(N, K, seed=77))
    close(F.linear(x, weight), F.linear(x, weight.dequantized()))
