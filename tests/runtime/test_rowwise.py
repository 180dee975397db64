"""Norms, gates and rotary embeddings in one pass come to what transformers' code does, and stand in for no other."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from runtime.kernels.rowwise import RUN
from runtime.model import rowwise
from runtime.model.rowwise import is_code_of, join_steps, joins_gates
from runtime.probing.meta import build_meta_model
from runtime.synthesize.checkpoints import config_for

pytestmark = pytest.mark.usefixtures("two_threads")
INTERMEDIATE = RUN + 40


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


def small(module: ModuleType, name: str, **keys: object) -> nn.Module:
    """A module of that family with random weights."""
    prefix = name.removesuffix("RMSNorm").removesuffix("MLP").removesuffix("Attention").removesuffix("Experts")
    config = getattr(module, f"{prefix}Config")(
        hidden_size=64,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        **keys,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    made = {"MLP": lambda c: c(config), "Experts": lambda c: c(config), "RMSNorm": lambda c: c(64, eps=1e-5)}
    make = made.get(name.removeprefix(prefix), lambda c: c(config, layer_idx=0))
    built = make(getattr(module, name)).eval()
    for i, parameter in enumerate(built.parameters()):
        parameter.data = random(*parameter.shape, seed=i) / 8
    return built


def joined(module: nn.Module, name: str = "forward") -> nn.Module:
    join_steps(module)
    assert name in vars(module)
    return module


@pytest.mark.parametrize("num_rows", [1, 3, 600])
def test_norms_are_as_precise_as_the_plain_ones(num_rows: int) -> None:
    norm, x = small(llama, "LlamaRMSNorm"), random(2, num_rows, 64) * 3
    plain, precise = norm(x), norm.double()(x.double())
    assert (joined(norm.float())(x) - precise).abs().max() < 2 * (plain - precise).abs().max() + 1e-6


def test_gates_keep_their_ends() -> None:
    """As far as float32 goes, and with what is no number."""
    numbers = torch.tensor([-1e30, -200.0, -88.0, -87.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 87.0, 89.0, 1e30, torch.nan])
    out = rowwise._gated(numbers[None], torch.ones(1, 13), 0, torch.empty(1, 13))[0]
    right = F.silu(numbers.double())
    torch.testing.assert_close(out.double(), right, rtol=5e-7, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("num_rows", [1, 5, 1030])
def test_a_feed_forward_is_as_precise_as_the_plain_one(num_rows: int) -> None:
    mlp, x = small(llama, "LlamaMLP"), random(1, num_rows, 64)
    plain, precise = mlp(x), mlp.double()(x.double())
    assert (joined(mlp.float())(x) - precise).abs().max() < 2 * (plain - precise).abs().max() + 1e-6


def test_a_feed_forward_takes_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, seen = joined(small(llama, "LlamaMLP")), list[int]()
    mlp.down_proj.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    monkeypatch.setattr(rowwise, "GATED_ROWS", 8)
    assert mlp(random(1, 20, 64)).shape == (1, 20, 64)
    assert seen == [8, 8, 4]


def test_experts_share_a_row_of_gates_and_what_they_let_through() -> None:
    experts, rows = small(mixtral, "MixtralExperts"), random(700, 2 * INTERMEDIATE)
    plain, precise = experts._apply_gate(rows), experts._apply_gate(rows.double())
    ours = joined(experts, "_apply_gate")._apply_gate(rows)
    assert ours.is_contiguous()
    assert (ours - precise).abs().max() < 2 * (plain - precise).abs().max() + 1e-6


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_queries_and_keys_turn_as_in_the_plain_code(num_sequences: int) -> None:
    angles = [random(num_sequences, 9, 16, seed=seed) for seed in (2, 3)]
    q, k = (random(num_sequences, 9, heads, 16, seed=heads).transpose(1, 2) for heads in (4, 2))
    for ours, plain in zip(rowwise._rotary(q, k, *angles), llama.apply_rotary_pos_emb(q, k, *angles), strict=True):
        assert ours.stride() == plain.stride()
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_angles_of_all_sequences_alike_turn_in_the_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "_turned", lambda *args: pytest.fail("there are fewer angles than tokens"))
    q, k, angles = random(2, 4, 9, 16), random(2, 2, 9, 16), (random(1, 9, 16), random(1, 9, 16))
    for ours, plain in zip(rowwise._rotary(q, k, *angles), llama.apply_rotary_pos_emb(q, k, *angles), strict=True):
        assert torch.equal(ours, plain)


def test_a_feed_forward_may_end_wider_than_it_began() -> None:
    """As Molmo's between images and text."""
    mlp = small(llama, "LlamaMLP")
    mlp.down_proj = nn.Linear(INTERMEDIATE, 96)
    x = random(2, 3, 64)
    plain = mlp(x)
    torch.testing.assert_close(joined(mlp)(x), plain, rtol=1e-4, atol=1e-4)


def test_a_part_of_each_head_turns_in_the_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Phi's does: what it gets is not in one piece."""
    monkeypatch.setattr(rowwise, "_turned", lambda *args: pytest.fail("it is not contiguous"))
    q, k, angles = random(1, 4, 9, 16)[..., :8], random(1, 2, 9, 16)[..., :8], (random(1, 9, 8), random(1, 9, 8))
    for ours, plain in zip(rowwise._rotary(q, k, *angles), llama.apply_rotary_pos_emb(q, k, *angles), strict=True):
        assert torch.equal(ours, plain)


def test_attention_of_many_families_turns_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of its own code: transformers keeps its function."""
    turned = list[str]()

    def noted(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned.append("q and k")
        return llama.apply_rotary_pos_emb(*args)

    monkeypatch.setattr(rowwise, "_rotary", noted)
    angles = (random(1, 5, 16), random(1, 5, 16, seed=1))
    for family, name in ((llama, "LlamaAttention"), (mixtral, "MixtralAttention"), (qwen3, "Qwen3Attention")):
        attention, x = small(family, name), random(1, 5, 64)
        plain = attention(x, position_embeddings=angles, attention_mask=None)[0]
        assert not turned
        ours = joined(attention)(x, position_embeddings=angles, attention_mask=None)[0]
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
        assert len(turned) == 1
        turned.clear()


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (random(1, 4, 64).bfloat16(), "another dtype"),
        (random(1, 64, 4).transpose(1, 2), "rows that lie otherwise"),
        (torch.zeros(1, 0, 64), "no rows"),
        (random(1, 1, 1).expand(1, 4, 64), "rows that are one number"),
    ],
)
def test_whatever_kernels_cannot_read_goes_the_plain_way(
    tensor: torch.Tensor, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = joined(small(llama, "LlamaRMSNorm"))
    monkeypatch.setattr(rowwise, "norm", lambda *args: pytest.fail(why))
    assert norm(tensor).shape == tensor.shape


def test_code_that_differs_stays() -> None:
    norm, mlp = GemmaRMSNorm(64), small(llama, "LlamaMLP", hidden_act="gelu")
    attention = small(cohere, "CohereAttention")  # turns neighbours
    for module in (norm, mlp, attention):
        join_steps(module)
        assert "forward" not in vars(module), type(module).__name__


def first() -> Callable[[int], int]:
    def step(x: int) -> int:
        """Says something."""
        return abs(x) + 1

    return step


def second() -> Callable[[int], int]:
    def other(x: int) -> int:
        """Says something else."""
        return abs(x) + 1

    return other


def test_code_is_known_by_its_instructions_names_and_constants() -> None:
    assert is_code_of(second(), first())
    assert not is_code_of(lambda x: abs(x) + 2, lambda x: abs(x) + 1)
    assert not is_code_of(lambda x: int(x) + 1, lambda x: abs(x) + 1)
    assert not is_code_of(lambda y: abs(y) + 1, lambda x: abs(x) + 1)
    assert not is_code_of(abs, first())
    assert not is_code_of(None, first())


@pytest.mark.parametrize(("family", "wanted"), [("llama", True), ("qwen2", True), ("mixtral", False), ("gpt2", False)])
def test_a_layer_joins_gates_where_its_one_feed_forward_is_ours(family: str, wanted: bool) -> None:
    model = build_meta_model(config_for(family, {}), torch.float32)
    join_steps(model)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    assert joins_gates(layers[0]) == wanted
