"""On an accelerator: weights in each storage format give the tokens of the numbers that they stand for, tokens are
drawn as transformers draws them there, and logits in 16 bits are near float32's.

Each law is also held on a double that launches what a device would, so that on a card only the card is new.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from runtime import Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import DType, MachineConfig, Quantize, Tier
from runtime.formats.kinds.rounded import ENCODINGS, Rounding
from runtime.linear.packed_rows import ROUNDED_ENCODINGS
from runtime.sequences.sequence import Completion
from tests.device_operators import operators_of_a_device
from tests.fake_device import FakeDevice
from tests.packed import write_packed
from tests.published_formats import PUBLISHED, write_published
from tests.quantized import Tensors, tensors_in, write_checkpoint, write_fp8, write_mxfp4
from tests.runtime.gpu_support import CUDA, ON_GPU, sampled_on_the_device
from tests.runtime.test_fidelity import config_for
from tests.support import (
    NUM_NEW_TOKENS,
    NUM_SAMPLED,
    TEMPERATURE,
    TOP_P,
    Reference,
    clear_tokens,
    synthesize,
    transformers_model,
)

References = Callable[[str], Reference]
Written = tuple[Path, Path]  # a checkpoint as it is stored, and one of plain numbers with the same tokens
WIDE = {  # rows of whole groups
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128, "intermediate_size": 192,
}  # fmt: skip
PROMPTS = [[5 + 7 * row + place for place in range(3 + 4 * row)] for row in range(8)]
NUM_CLEAR = 4  # prompts whose tokens are clear choices, at least
NEAR = 2e-2  # root mean squares, as a share of the deviation of log-probabilities
MOST_OF_USUAL = 1.25
NUM_TOP = 20  # log-probabilities beside each token


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run computes: on a card, or on the double of one, by the operators of a device."""

    is_card: bool

    def run(self, config: RuntimeConfig, prompts: list[list[int]]) -> list[Completion]:
        """In the order of the prompts, all of which end."""
        machine = CUDA if self.is_card else MachineConfig()
        device = None if self.is_card else FakeDevice((False, True))
        with nullcontext() if self.is_card else operators_of_a_device():
            found = Runtime(replace(config, machine=machine), device=device).generate(prompts)
        completions = [each for each in found if isinstance(each, Completion) and each.error is None]
        assert len(completions) == len(prompts), found
        return completions

    def tokens(self, config: RuntimeConfig, prompts: list[list[int]]) -> list[list[int]]:
        return [list(each.token_ids) for each in self.run(config, prompts)]


@pytest.fixture(params=[pytest.param(True, marks=ON_GPU, id="card"), pytest.param(False, id="double")])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(is_card=request.param)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`published(family)`: a checkpoint in bfloat16 whose matrices each format takes."""
    home = tmp_path_factory.mktemp("published")

    def get(family: str) -> Path:
        return home / family if (home / family).exists() else synthesize(family, home / family, **WIDE)

    return get


def packed(source: Path, folder: Path, rounding: Rounding | None) -> Written:
    """As `weightstream pack` stores it."""
    store = write_packed(source, folder / "store", rounding)
    return store, source if rounding is None else dequantized(source, store, folder / "plain")


def dequantized(source: Path, store: Path, directory: Path) -> Path:
    """The checkpoint of a store's numbers, in float32: those that were rounded decoded as
    docs/reference/storage-formats.md says, others as they are published."""
    stored, numbers = tensors_in(store), tensors_in(source)
    for name, (codes, scales) in {
        name: (stored[f"{name}_{format}"], stored[f"{name}_scales"])
        for name in numbers
        for format in ROUNDED_ENCODINGS
        if f"{name}_{format}" in stored
    }.items():
        if f"{name}_int4-groups" in stored:
            runs = codes.unflatten(1, (-1, 16))
            found = torch.cat([runs & 15, runs >> 4], -1).flatten(1).float() - 8
        else:
            dtype = torch.int8 if f"{name}_int8-rows" in stored else torch.float8_e4m3fn
            found = codes.view(dtype).float()
        numbers[name] = (found.unflatten(1, (scales.shape[1], -1)) * scales.float()[..., None]).flatten(1)
    assert any(name.endswith(tuple(ROUNDED_ENCODINGS)) for name in stored), "something was rounded"
    return write_checkpoint(source, directory, numbers)


def in_gguf(source: Path, folder: Path) -> Written:
    """As llama.cpp's converter writes it."""
    gguf = pytest.importorskip("gguf", reason="it writes such files")
    pytest.importorskip("transformers.integrations.gguf", reason="transformers 5.18 or newer reads GGUF files as we do")
    from tests.gguf_files import write_gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(source, folder / "model.gguf", {"": kind})
    numbers: Tensors = {}
    for name, tensor in transformers_model(source).state_dict().items():
        is_kept = tensor.ndim == 1
        array = tensor.numpy()
        found = array if is_kept else gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        numbers[name] = torch.from_numpy(found).clone()
    return path, write_checkpoint(source, folder / "plain", numbers)


def as_published(name: str) -> Callable[[Path, Path], Written]:
    return lambda source, folder: write_published(source, folder, PUBLISHED[name])


STORES: Mapping[str, tuple[str, Callable[[Path, Path], Written]]] = {
    **{
        f"{family}, {name}": (family, partial(packed, rounding=rounding))
        for family in ("llama", "mixtral")
        for name, rounding in {"lossless": None, **{way: Rounding(way) for way in ENCODINGS}}.items()
    },
    "gpt-oss, mxfp4": ("gpt-oss", write_mxfp4),
    "llama, fp8 blocks": ("llama", lambda source, folder: write_fp8(source, folder, (32, 48))),
    "qwen3-moe, fp8 blocks": ("qwen3-moe", lambda source, folder: write_fp8(source, folder, (128, 128))),
    "llama, gptq": ("llama", as_published("gptq")),
    "mixtral, gptq": ("mixtral", as_published("gptq_v2, zero points")),
    "qwen2, awq": ("qwen2", as_published("awq")),
    "mixtral, awq": ("mixtral", as_published("awq")),
    "llama, gguf": ("llama", in_gguf),
}


def clear_answers(plain: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts whose greedy tokens are clear choices, and these, by transformers on the CPU in float32."""
    model = transformers_model(plain)
    found = [(prompt, clear_tokens(model, prompt)) for prompt in PROMPTS]
    clear = [(prompt, tokens) for prompt, tokens in found if tokens is not None]
    assert len(clear) >= NUM_CLEAR, "too few to say anything"
    return [prompt for prompt, _ in clear], [tokens for _, tokens in clear]


def at(path: Path, tier: Tier, quantize: Quantize | None = None) -> RuntimeConfig:
    """Layers are streamed, where a tier has them elsewhere."""
    elsewhere = Reference(directory=path, prompts=[], expected=[], sampled=[])
    config = config_for(elsewhere, tier=tier, resident_layers=None if tier is Tier.none else 0)
    return replace(config, model=replace(config.model, quantize=quantize))


@pytest.mark.dealt(most=5)
@pytest.mark.parametrize("name", STORES)
def test_stored_weights_give_the_tokens_of_their_numbers(
    name: str, place: Place, published: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where all weights lie in the device, and where each layer, or expert, comes over the link as it is stored."""
    family, write = STORES[name]
    stored, plain = write(published(family), tmp_path)
    prompts, expected = clear_answers(plain)
    for tier in (Tier.none, Tier.cpu):
        assert place.tokens(at(stored, tier), prompts) == expected, tier


@pytest.mark.dealt
@pytest.mark.parametrize("quantize", Quantize)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_rounded_as_they_are_read_give_the_tokens_of_a_packed_store(
    family: str, quantize: Quantize, place: Place, published: Callable[[str], Path], tmp_path: Path
) -> None:
    _, plain = packed(published(family), tmp_path, Rounding(quantize.value))
    prompts, expected = clear_answers(plain)
    assert place.tokens(at(published(family), Tier.cpu, quantize), prompts) == expected


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tokens_are_drawn_as_transformers_draws_them_there(family: str, place: Place, reference: References) -> None:
    """By the seed of each request: a device has a generator of its own, whose numbers are others than a CPU's."""
    ref = reference(family)
    sampling = SamplingConfig(
        max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True, temperature=TEMPERATURE, top_p=TOP_P, top_k=0
    )
    expected = sampled_on_the_device(ref) if place.is_card else ref.sampled
    assert len({token for row in expected for token in row}) > NUM_SAMPLED
    for tier in (Tier.none, Tier.cpu):
        config = config_for(ref, tier=tier, sampling=sampling, resident_layers=None if tier is Tier.none else 0)
        assert place.tokens(config, ref.prompts[:NUM_SAMPLED]) == expected, tier


@pytest.mark.dealt("dtype", "family")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_log_probabilities_in_16_bits_are_near_those_of_float32(
    family: str, dtype: torch.dtype, place: Place, tmp_path: Path
) -> None:
    """And as near as those of transformers' own model in that dtype: of the likeliest tokens in each place of a run's
    own. The model has one layer, since each more of random weights adds to what rounding does."""
    directory = synthesize(family, tmp_path / "model", **WIDE, num_hidden_layers=1)
    exact, rounded = (transformers_model(directory, each) for each in (torch.float32, dtype))
    config = at(directory, Tier.cpu)
    config = replace(
        config,
        model=replace(config.model, dtype=DType[str(dtype).removeprefix("torch.")]),
        sampling=replace(config.sampling, logprobs=NUM_TOP),
    )
    ours, theirs, spreads = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for completion, prompt in zip(place.run(config, PROMPTS), PROMPTS, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            wanted, near = (
                torch.log_softmax(m(ids).logits[0, len(prompt) - 1 : -1].float(), -1) for m in (exact, rounded)
            )
        top = torch.tensor([found.top_ids for found in completion.logprobs])
        right = wanted.gather(1, top)
        ours.append(torch.tensor([found.top for found in completion.logprobs]) - right)
        theirs.append(near.gather(1, top) - right)
        spreads.append(wanted - wanted.mean(1, keepdim=True))
    error, usual, spread = (torch.cat(each).square().mean().sqrt() for each in (ours, theirs, spreads))
    assert 0 < error < NEAR * spread
    assert error < MOST_OF_USUAL * usual
