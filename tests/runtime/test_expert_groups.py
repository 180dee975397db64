"""Experts that run at once give what each one by itself gives: in an accelerator's memory in few launches and without
waits, in the host's with threads that take whole ones."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from runtime.config.settings import DType, ExpertPaging, Lanes, ModelConfig
from runtime.linear import backends, work_items
from runtime.linear.blocks import join_blocks, join_stacks
from runtime.linear.stored import StoredWeight
from runtime.model import expert_groups
from runtime.model.expert_groups import can_run_group, run_group, run_on_device, run_on_host, supports_grouped_mm
from runtime.model.experts import Experts, Visits, bound_matrices, expert_output, matrix_names, mix_experts
from runtime.model.loading import load_model
from tests.fake_device import FakeDevice
from tests.host_counters import counting, mark
from tests.host_counts import HostCounts
from tests.runtime.expert_support import DEVICE, lanes_of, player
from tests.runtime.test_moves import shift
from tests.support import synthesize

D, INNER, K = 32, 16, 4
Together = Callable[..., torch.Tensor | None]


def mixtral(num_experts: int, hidden: int = D, inner: int = INNER) -> nn.Module:
    return MixtralExperts(MixtralConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=num_experts))


def with_norm(num_experts: int, hidden: int = D, inner: int = INNER) -> nn.Module:
    module = mixtral(num_experts, hidden, inner)
    vars(module).update(has_post_expert_norm=True)
    module.post_expert_norm = nn.RMSNorm(hidden)
    return module


def gpt_oss(num_experts: int) -> nn.Module:
    return GptOssExperts(GptOssConfig(hidden_size=D, intermediate_size=INNER, num_local_experts=num_experts))


def ungated(num_experts: int, hidden: int = D, inner: int = INNER) -> nn.Module:
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "n_routed_experts": num_experts}
    return NemotronHExperts(NemotronHConfig(**sizes, moe_latent_size=None))


LARGER = {
    "mixtral": partial(mixtral, hidden=64, inner=32),
    "a norm behind": partial(with_norm, hidden=64, inner=32),
    "no gate": partial(ungated, hidden=64, inner=32),
}
KINDS = {"mixtral": mixtral, "a norm behind": with_norm, "transposed, biases": gpt_oss, "no gate": ungated}


def drawn(make: Callable[[int], nn.Module], dtype: torch.dtype, num_experts: int = 24) -> nn.Module:
    module, generator = make(num_experts), torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return module.to(dtype).requires_grad_(False)


def asked(
    num_tokens: int, dtype: torch.dtype, num_experts: int = 24
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, experts and their weights."""
    generator = torch.Generator().manual_seed(num_tokens)
    weights_TK, index_TK = torch.rand(num_tokens, num_experts, generator=generator).topk(K)
    return torch.randn(num_tokens, D, generator=generator).to(dtype), index_TK, weights_TK.softmax(-1)


def plainly(
    module: nn.Module, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    visits = Visits.from_top_k(index_TK, weights_TK, cast(Experts, module).num_experts)
    return mix_experts(module, hidden_TD, visits, ((expert, bound_matrices(module, expert)) for expert in visits.hit))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 7, 90])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2), (torch.float16, 8e-3)])
def test_the_sum_over_experts_is_that_of_the_plain_loop(
    dtype: torch.dtype, close: float, num_tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also cut into runs of experts, of which one may have more visits than fit. Where it adds a bias, a narrow dtype
    rounds once more."""
    module, given = drawn(KINDS[kind], dtype), asked(num_tokens, dtype)
    expected = plainly(module, *given)
    for most, is_by_all in ((expert_groups.GROUPED_VISITS, False), (0, True), (60, False), (0, False)):
        monkeypatch.setattr(expert_groups, "GROUPED_VISITS", most)
        monkeypatch.setattr(expert_groups, "multiplies_all_experts", lambda *sizes, answer=is_by_all: answer)
        found = run_on_device(module, *given)
        assert found is not None
        torch.testing.assert_close(found, expected, atol=close, rtol=close)


def test_what_an_expert_makes_of_tokens_that_do_not_visit_it_does_not_matter() -> None:
    """Such as numbers too large for float16."""
    module, (hidden_TD, _, weights_TK) = drawn(mixtral, torch.float32, 8), asked(8, torch.float32, 8)
    module.down_proj[0] = torch.inf
    index_TK = torch.arange(8)[:, None].expand(8, K) % 4 + torch.arange(K)
    index_TK[index_TK == 0] = 7
    expected = plainly(module, hidden_TD, index_TK, weights_TK)
    found = run_on_device(module, hidden_TD, index_TK, weights_TK)
    assert found is not None
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)


def counted(act: Callable[[], object]) -> HostCounts:
    with counting() as counter, torch.inference_mode():
        counter.take()
        act()
        return counter.take()


def counts_of(dtype: torch.dtype, num_experts: int, compute: Together, num_tokens: int = 64) -> HostCounts:
    module = drawn(mixtral, dtype, num_experts)
    given = asked(num_tokens, dtype, num_experts)
    for tensor in (*module.parameters(), *given):
        mark(tensor)
    return counted(lambda: compute(module, *given))


def test_grouped_experts_take_as_many_launches_however_many_there_are_and_no_wait() -> None:
    few, many = (counts_of(torch.bfloat16, num_experts, run_on_device) for num_experts in (8, 64))
    assert few.num_launches == many.num_launches <= 24 + K
    assert few.num_syncs == many.num_syncs == 0


def test_few_tokens_that_hit_most_experts_take_as_many_launches_and_no_wait_without_a_kernel() -> None:
    few, many = (counts_of(torch.float32, num_experts, run_on_device, num_tokens=16) for num_experts in (8, 64))
    assert few.num_launches == many.num_launches <= 20 + K
    assert few.num_syncs == many.num_syncs == 0


def test_experts_without_a_kernel_for_all_take_three_launches_each_and_one_wait() -> None:
    found, plain = (counts_of(torch.float32, 64, compute, num_tokens=65) for compute in (run_on_device, plainly))
    assert found.num_launches <= 3 * 64 + 20
    assert found.num_syncs == plain.num_syncs == 1
    assert plain.num_launches > 2 * found.num_launches


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(
    ("dtype", "names_ascend"), [(DType.float32, True), (DType.bfloat16, True), (DType.bfloat16, False)]
)
def test_experts_stored_one_by_one_are_run_at_once_on_a_device(
    dtype: DType, names_ascend: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = synthesize("qwen3-moe", tmp_path / "model", num_experts=12, moe_intermediate_size=64)
    if names_ascend:
        (path,) = directory.glob("*.safetensors")
        dtype_of_file = getattr(torch, dtype.value)
        save_file({name: tensor.to(dtype_of_file) for name, tensor in load_file(path).items()}, path)
    config = ModelConfig(name="test", path=str(shift(directory, 8)), dtype=dtype, lanes=Lanes.padded)
    loaded, lanes = load_model(config, DEVICE.torch_device, None), lanes_of(2, 2, 5)
    answers: list[bool] = []

    def watched(module: nn.Module, *args: torch.Tensor) -> torch.Tensor | None:
        found = run_on_device(module, *args)
        answers.append(found is not None)
        return found

    monkeypatch.setattr("runtime.engine.experts.run_on_device", watched)
    found = []
    for device in (DEVICE, FakeDevice()):
        with player(loaded, ExpertPaging.off, device=device) as played:
            found.append(played.logits(lanes, is_batched=True))
    assert answers
    assert all(answers)
    close = 5e-5 if dtype is DType.float32 else 5e-2  # products of one are not added up as those of the other
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=close, rtol=close)


def test_stacks_that_kernels_would_refuse_are_not_given_to_them() -> None:
    memory = torch.zeros(3 * 64 * 64 + 8, dtype=torch.bfloat16)
    good = memory[: 3 * 64 * 64].view(3, 64, 64)
    assert supports_grouped_mm([good])
    assert not supports_grouped_mm([good.float()])
    assert not supports_grouped_mm([good.half()])
    assert not supports_grouped_mm([memory[4:][: 3 * 64 * 64].view(3, 64, 64)]), "8 bytes past a multiple of 16"
    assert not supports_grouped_mm([good[:, :, :60].contiguous()[:, :, :57]]), "rows of 120 bytes"


@pytest.mark.parametrize(("major", "is_taken"), [(7, False), (8, False), (9, True), (10, True), (12, False)])
def test_only_processors_with_the_kernel_are_asked(major: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere torch's own operator reads the ends back, once for each product."""

    class OnCuda:
        device, dtype, is_cpu = torch.device("cuda:1"), torch.bfloat16, False
        stack = torch.zeros(2, 16, 16, dtype=torch.bfloat16)

        def __len__(self) -> int:
            return 2

        def __getattr__(self, name: str) -> object:
            return getattr(self.stack, name)

    asked_of: list[torch.device] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked_of.append(device) or (major, 0))
    assert supports_grouped_mm([OnCuda()]) is is_taken  # pyright: ignore[reportArgumentType]
    assert asked_of == [torch.device("cuda:1")]


def blocks_of(memory: torch.Tensor, begins: list[int], rows: int = 4) -> list[torch.Tensor]:
    return [memory[begin : begin + rows * 8].view(rows, 8) for begin in begins]


def test_blocks_are_joined_only_where_they_lie_so() -> None:
    memory = torch.arange(1000.0)
    gates, ups = blocks_of(memory, [0, 100, 200]), blocks_of(memory, [32, 132, 232])
    (stack,) = join_stacks(list(zip(gates, ups, strict=True)), torch.float32)
    for expert, pair in enumerate(zip(gates, ups, strict=True)):
        assert torch.equal(stack[expert], torch.cat(pair))
    assert stack.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert len(join_stacks(list(zip(gates, blocks_of(memory, [40, 140, 240]), strict=True)), torch.float32)) == 2
    assert len(join_stacks([[block] for block in blocks_of(memory, [0, 100, 300])], torch.float32)) == 0
    assert len(join_stacks([[block] for block in blocks_of(memory, [200, 100, 0])], torch.float32)) == 0
    assert len(join_stacks([[gates[0]], [torch.zeros(4, 8)]], torch.float32)) == 0
    assert len(join_stacks([[block] for block in gates], torch.float64)) == 0
    whole = join_blocks([gates[0], ups[0]], torch.float32)
    assert whole is not None
    assert torch.equal(whole, torch.cat([gates[0], ups[0]]))
    assert join_blocks([gates[0], gates[1]], torch.float32) is None


def test_a_plain_expert_on_a_device_is_one_launch() -> None:
    """Of neighbouring rows too; products of a CPU are turned for its caches."""
    memory = torch.zeros(4096, device="meta")
    entries = [[memory[begin : begin + 128].view(8, 16) for begin in (start, start + 128)] for start in (0, 256)]
    weight, x, bias = StoredWeight(entries, (2, 16, 16), torch.float32, is_stacked=True), memory[:48].view(3, 16), None
    for bias in (None, memory[:16]):
        mark(memory)
        counts = counted(lambda bias=bias: nn.functional.linear(x, weight[1], bias))
        assert counts.num_launches == 1


def stored(module: nn.Module) -> nn.Module:
    """Its stacks as bfloat16 that products take as it lies."""
    for name in matrix_names(module):
        stack = getattr(module, name)
        entries = [[matrix.contiguous()] for matrix in stack.bfloat16()]
        delattr(module, name)
        setattr(module, name, StoredWeight(entries, stack.shape, stack.dtype, is_stacked=True))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("most_bytes", [1 << 14, 1 << 30], ids=["several runs", "one run"])
@pytest.mark.parametrize("kind", ["mixtral", "a norm behind", "no gate"])
def test_experts_in_host_memory_give_what_each_by_itself_gives_to_the_bit(
    kind: str, most_bytes: int, num_threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_items, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(expert_groups, "GROUPED_BYTES", most_bytes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    taken, by_groups = list[int](), backends.multiply_groups_in_vectors

    def noted(x: torch.Tensor, groups: Any, *, pairs: bool) -> torch.Tensor:
        taken.append(len(groups))
        return by_groups(x, groups, pairs=pairs)

    monkeypatch.setattr(backends, "multiply_groups_in_vectors", noted)
    module, (hidden_TD, index_TK, weights_TK) = stored(drawn(LARGER[kind], dtype)), asked(40, dtype)
    hidden_TD = hidden_TD.repeat(1, 2)
    visits = Visits.from_top_k(index_TK, weights_TK.to(dtype), 24)
    found = run_on_host(module, hidden_TD, visits)
    assert found is not None
    assert taken
    expected = torch.zeros(hidden_TD.shape)
    for expert in visits.hit:
        mine, result = (
            visits.expert_rows(expert),
            expert_output(module, bound_matrices(module, expert), expert, hidden_TD, visits),
        )
        weighted = (result * visits.weights_V[mine, None]).to(dtype)
        expected.index_add_(0, visits.tokens_V[mine], weighted.float())
    assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize(("num_tokens", "num_threads"), [(2, 1), (40, 4), (2000, 1)], ids=["few", "threads", "many"])
def test_experts_in_host_memory_are_run_at_once_where_they_are_many_and_have_few_visits(
    num_tokens: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    module, (hidden_TD, index_TK, weights_TK) = stored(drawn(mixtral, torch.float32)), asked(num_tokens, torch.float32)
    if num_tokens == 2:
        index_TK = index_TK.clamp(max=3)
    assert run_on_host(module, hidden_TD, Visits.from_top_k(index_TK, weights_TK, 24)) is None


@pytest.mark.parametrize("kind", ["transposed, biases", "mixtral"])
def test_experts_that_lie_otherwise_are_left_to_others(kind: str) -> None:
    module, (hidden_TD, index_TK, weights_TK) = drawn(KINDS[kind], torch.float32), asked(40, torch.float32)
    module = stored(module) if kind != "mixtral" else module
    assert run_on_host(module, hidden_TD, Visits.from_top_k(index_TK, weights_TK, 24)) is None


@pytest.mark.parametrize("kind", [*LARGER, "one stored otherwise"])
def test_some_experts_in_host_memory_give_what_each_by_itself_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_items, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    taken, by_groups = list[int](), backends.multiply_groups_in_vectors

    def noted(x: torch.Tensor, groups: Any, *, pairs: bool) -> torch.Tensor:
        taken.append(len(groups))
        return by_groups(x, groups, pairs=pairs)

    monkeypatch.setattr(backends, "multiply_groups_in_vectors", noted)
    module = stored(drawn(LARGER.get(kind, LARGER["mixtral"]), torch.float32))
    hidden_TD, index_TK, weights_TK = asked(40, torch.float32)
    hidden_TD, visits = hidden_TD.repeat(1, 2), Visits.from_top_k(index_TK, weights_TK, 24)
    matrices = {expert: bound_matrices(module, expert) for expert in visits.hit[1::2]}
    if kind == "one stored otherwise":  # as in a checkpoint that leaves some experts unquantized
        other = next(iter(matrices))
        plain = {name: matrix.dequantized() for name, matrix in cast(Any, matrices[other]).items()}
        matrices[other] = {n: StoredWeight([[m]], m.shape, m.dtype, is_stacked=False) for n, m in plain.items()}
    expected = {e: expert_output(module, own, e, hidden_TD, visits) for e, own in matrices.items()}
    assert can_run_group(module, hidden_TD, visits, [*matrices])
    found = run_group(module, matrices, hidden_TD, visits)
    assert taken == ([] if kind == "one stored otherwise" else [len(matrices)] * 2)
    assert list(found) == list(expected)
    assert all(torch.equal(found[expert], output) for expert, output in expected.items())
    monkeypatch.setattr(expert_groups, "GROUPED_BYTES", 1 << 14)
    assert not can_run_group(module, hidden_TD, visits, [*matrices]), "outputs would not fit the memory that is planned"


def test_transposed_experts_do_not_run_in_a_group() -> None:
    module, (hidden_TD, index_TK, weights_TK) = drawn(gpt_oss, torch.float32), asked(40, torch.float32)
    visits = Visits.from_top_k(index_TK, weights_TK, 24)
    assert not can_run_group(stored(module), hidden_TD, visits, visits.hit)
