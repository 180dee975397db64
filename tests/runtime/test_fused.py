"""Norms, gates and rotary embeddings in one pass come to what transformers' code does, and stand in for no other."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from runtime.config.settings import DType, ModelConfig
from runtime.kernels.rowwise import RUN
from runtime.model import fused_ops
from runtime.model.capabilities import has_fused_gate
from runtime.model.experts import apply_activation
from runtime.model.fused import FusedGate, FusedOps, fuse, has_same_code
from runtime.model.fused_ops import host_ops as ops_of_this_host
from runtime.model.loading import load_model
from runtime.model.stages import Binding
from runtime.probing.meta import build_meta_model
from runtime.synthesize.checkpoints import make_config
from tests.support import Reference

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


def ops(**other: object) -> FusedOps:
    found = ops_of_this_host()
    assert found is not None
    return replace(found, **other)


def in_its_place(module: nn.Module, **other: object) -> nn.Module:
    """What stands in the place of a module once its parent is fused, which is another."""
    parent = nn.ModuleDict({"child": module})
    fuse(parent, ops(**other))
    assert parent["child"] is not module
    assert parent["child"].state_dict().keys() == module.state_dict().keys()
    return parent["child"]


@pytest.mark.parametrize("num_rows", [1, 3, 600])
def test_norms_are_as_precise_as_the_plain_ones(num_rows: int) -> None:
    norm, x = small(llama, "LlamaRMSNorm"), random(2, num_rows, 64) * 3
    plain, precise = norm(x), norm.double()(x.double())
    assert (in_its_place(norm.float())(x) - precise).abs().max() < 2 * (plain - precise).abs().max() + 1e-6


def test_gates_keep_their_ends() -> None:
    """As far as float32 goes, and with what is no number."""
    numbers = torch.tensor([-1e30, -200.0, -88.0, -87.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 87.0, 89.0, 1e30, torch.nan])
    out = fused_ops._apply_gate(numbers[None], torch.ones(1, 13), 0, torch.empty(1, 13))[0]
    right = F.silu(numbers.double())
    torch.testing.assert_close(out.double(), right, rtol=5e-7, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("num_rows", [1, 5, 1030])
def test_a_feed_forward_is_as_precise_as_the_plain_one(num_rows: int) -> None:
    mlp, x = small(llama, "LlamaMLP"), random(1, num_rows, 64)
    plain, precise = mlp(x), mlp.double()(x.double())
    assert (in_its_place(mlp.float())(x) - precise).abs().max() < 2 * (plain - precise).abs().max() + 1e-6


def test_a_feed_forward_takes_a_few_rows_at_a_time() -> None:
    mlp, seen = in_its_place(small(llama, "LlamaMLP"), mlp_rows=8), list[int]()
    mlp.down_proj.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    assert mlp(random(1, 20, 64)).shape == (1, 20, 64)
    assert seen == [8, 8, 4]


def test_experts_share_a_row_of_gates_and_what_they_let_through() -> None:
    experts, rows = small(mixtral, "MixtralExperts"), random(700, 2 * INTERMEDIATE)
    plain, precise = experts._apply_gate(rows), experts._apply_gate(rows.double())
    fuse(experts, ops())
    assert isinstance(experts.act_fn, FusedGate)
    ours = apply_activation(experts, rows)
    assert ours.is_contiguous()
    assert (ours - precise).abs().max() < 2 * (plain - precise).abs().max() + 1e-6


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_queries_and_keys_turn_as_in_the_plain_code(num_sequences: int) -> None:
    angles = [random(num_sequences, 9, 16, seed=seed) for seed in (2, 3)]
    q, k = (random(num_sequences, 9, heads, 16, seed=heads).transpose(1, 2) for heads in (4, 2))
    rotated = fused_ops.rotate(q, k, *angles)
    assert rotated is not None
    for ours, plain in zip(rotated, llama.apply_rotary_pos_emb(q, k, *angles), strict=True):
        assert ours.stride() == plain.stride()
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_bfloat16_is_rounded_where_the_plain_code_rounds_it() -> None:
    """Sums and exponentials differ in their last bits, so that one number in some hundred is rounded otherwise."""
    norm, mlp, experts = (
        small(llama, "LlamaRMSNorm").bfloat16(),
        small(llama, "LlamaMLP").bfloat16(),
        small(mixtral, "MixtralExperts").bfloat16(),
    )
    x, rows = random(300, 64).bfloat16(), random(300, 2 * INTERMEDIATE).bfloat16()
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    q, k = (random(1, 9, heads, 16, seed=heads).bfloat16().transpose(1, 2) for heads in (4, 2))
    angles = [random(1, 9, 16, seed=seed).bfloat16() for seed in (2, 3)]
    plain = [
        norm(x),
        F.silu(gate) * up,
        experts._apply_gate(rows),
        *llama.apply_rotary_pos_emb(q, k, *angles),
    ]
    ours = [
        fused_ops.norm(x, norm.weight, norm.variance_epsilon),
        fused_ops.gate(gate.clone(), up),
        fused_ops.gate_halves(rows),
        *(fused_ops.rotate(q, k, *angles) or ()),
    ]
    for found, expected in zip(ours, plain, strict=True):
        assert found is not None
        assert found.dtype is torch.bfloat16
        assert (found != expected).float().mean() < 0.01
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    assert torch.equal(ours[3], plain[3])


def test_no_number_of_bfloat16_stays_none() -> None:
    x = torch.tensor([[torch.nan, torch.inf, 1.0, -1e30]]).bfloat16()
    out = fused_ops.gate(x.clone(), torch.ones_like(x))
    assert out is not None
    torch.testing.assert_close(out, F.silu(x), equal_nan=True)


def test_angles_of_all_sequences_alike_turn_in_the_plain_code() -> None:
    assert fused_ops.rotate(random(2, 4, 9, 16), random(2, 2, 9, 16), random(1, 9, 16), random(1, 9, 16)) is None


def test_a_feed_forward_may_end_wider_than_it_began() -> None:
    """As Molmo's between images and text."""
    mlp = small(llama, "LlamaMLP")
    mlp.down_proj = nn.Linear(INTERMEDIATE, 96)
    x = random(2, 3, 64)
    plain = mlp(x)
    torch.testing.assert_close(in_its_place(mlp)(x), plain, rtol=1e-4, atol=1e-4)


def test_a_part_of_each_head_turns_in_the_plain_code() -> None:
    """As Phi's does: what it gets is not in one piece."""
    q, k = random(1, 4, 9, 16)[..., :8], random(1, 2, 9, 16)[..., :8]
    assert fused_ops.rotate(q, k, random(1, 9, 8), random(1, 9, 8)) is None


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(
    ("family", "name", "keys"),
    [
        (llama, "LlamaAttention", {}),
        (mixtral, "MixtralAttention", {"sliding_window": 3}),
        (mistral, "MistralAttention", {"sliding_window": 3}),
        (qwen2, "Qwen2Attention", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
        (qwen3, "Qwen3Attention", {}),
    ],
)
def test_attention_of_many_families_turns_by_ours_or_by_the_plain_code(
    family: ModuleType, name: str, keys: dict[str, object], *, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned, handed = list[str](), list[dict[str, object]]()

    def noted(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        turned.append("q and k")
        return llama.apply_rotary_pos_emb(*args) if is_ours else None

    def eager(*args: torch.Tensor, **wishes: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        handed.append(wishes)
        return llama.eager_attention_forward(*args, **wishes)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "noted", eager)
    attention, x = small(family, name, **keys), random(1, 5, 64)
    attention.config._attn_implementation = "noted"
    mask = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)[None, None]
    wishes = {"position_embeddings": (random(1, 5, 16), random(1, 5, 16, seed=1)), "attention_mask": mask}
    plain = attention(x, **wishes, other="kept")[0]
    assert not turned
    ours = in_its_place(attention, rotate=noted)(x, **wishes, other="kept")[0]
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    assert len(turned) == 1
    assert handed[0] == handed[1]
    assert handed[0].get("sliding_window") == keys.get("sliding_window")


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(random(1, 4, 64).bfloat16(), id="another dtype"),
        pytest.param(random(1, 64, 4).transpose(1, 2), id="rows that lie otherwise"),
        pytest.param(torch.zeros(1, 0, 64), id="no rows"),
        pytest.param(random(1, 1, 1).expand(1, 4, 64), id="rows that are one number"),
    ],
)
def test_whatever_kernels_cannot_read_goes_the_plain_way(tensor: torch.Tensor) -> None:
    norm = small(llama, "LlamaRMSNorm")
    assert fused_ops.norm(tensor, norm.weight, 1e-5) is None
    assert torch.equal(in_its_place(norm)(tensor), norm(tensor))


def test_code_that_differs_stays() -> None:
    norm, mlp = GemmaRMSNorm(64), small(llama, "LlamaMLP", hidden_act="gelu")
    attention = small(cohere, "CohereAttention")  # turns neighbours
    parent = nn.ModuleList([norm, mlp, attention])
    assert not fuse(parent, ops())
    assert list(parent) == [norm, mlp, attention]


def test_an_attention_that_calls_other_functions_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code may be Llama's, and what it calls by name another family's."""
    monkeypatch.setattr(qwen2, "apply_rotary_pos_emb", cohere.apply_rotary_pos_emb)
    assert not fuse(nn.ModuleList([small(qwen2, "Qwen2Attention")]), ops())
    monkeypatch.undo()
    monkeypatch.setattr(qwen2, "repeat_kv", lambda hidden_states, n_rep: hidden_states)
    assert not fuse(nn.ModuleList([small(qwen2, "Qwen2Attention")]), ops())


def test_who_still_holds_the_original_finds_the_weights_that_are_bound() -> None:
    norm = small(llama, "LlamaRMSNorm")
    stand_in, weight = in_its_place(norm), random(64, seed=5)
    with Binding(stand_in, ["weight"]).bound({"weight": weight}):
        assert norm.weight is weight


def test_a_module_with_several_places_has_one_stand_in() -> None:
    norm = small(llama, "LlamaRMSNorm")
    parent = nn.ModuleList([norm, norm])
    assert fuse(parent, ops()) == {"RMS norms": 1}
    assert parent[0] is parent[1]


FUSED = {  # a release of transformers that edits a line of theirs shows here
    "llama": {"RMS norms": 9, "gated feed-forwards": 4, "rotary embeddings": 4},
    "mistral": {"RMS norms": 9, "gated feed-forwards": 4, "rotary embeddings": 4},
    "qwen2": {"RMS norms": 9, "gated feed-forwards": 4, "rotary embeddings": 4},
    "qwen3": {"RMS norms": 17, "gated feed-forwards": 4, "rotary embeddings": 4},
    "mixtral": {"RMS norms": 9, "gates of experts": 4, "rotary embeddings": 4},
    "gpt2": {},
}


@pytest.mark.parametrize("family", FUSED)
def test_it_is_known_what_is_fused_of_a_family_and_names_stay(family: str) -> None:
    model = build_meta_model(make_config(family, {"num_hidden_layers": 4}), torch.float32)
    names = list(model.state_dict())
    assert fuse(model, ops()) == FUSED[family]
    assert list(model.state_dict()) == names
    assert not fuse(model, ops()), "stand-ins are no originals"


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
    assert has_same_code(second(), first())
    assert not has_same_code(lambda x: abs(x) + 2, lambda x: abs(x) + 1)
    assert not has_same_code(lambda x: int(x) + 1, lambda x: abs(x) + 1)
    assert not has_same_code(lambda y: abs(y) + 1, lambda x: abs(x) + 1)
    assert not has_same_code(abs, first())
    assert not has_same_code(None, first())


@pytest.mark.parametrize(("family", "wanted"), [("llama", True), ("qwen2", True), ("mixtral", False), ("gpt2", False)])
def test_a_layer_has_a_fused_gate_where_its_one_feed_forward_is_ours(family: str, wanted: bool) -> None:
    model = build_meta_model(make_config(family, {}), torch.float32)
    fuse(model, ops())
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    assert has_fused_gate(layers[0]) == wanted


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama", "LlamaForCausalLM: fused modules: 9 RMS norms, 4 gated feed-forwards, 4 rotary embeddings"),
        ("gpt2", "GPT2LMHeadModel: fused modules: none"),
    ],
)
def test_a_line_of_the_log_says_what_is_fused(
    family: str, said: str, reference: Callable[[str], Reference], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        load_model(ModelConfig(path=str(reference(family).directory), dtype=DType.float32), torch.device("cpu"), None)
    assert said in caplog.text
