"""Shared by the tests: transformers' own answers for tiny models of every family, to compare with."""

import fcntl
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, BartConfig, BartForConditionalGeneration, PreTrainedModel

from runtime.config.profiles import BackendTable, LinearBackend
from runtime.measure.linear import backend_product_kinds
from runtime.model.families import FAMILIES, Family
from runtime.probing.meta import auto_class
from runtime.sequences.sequence import Request
from runtime.store.checkpoint import NUM_SAMPLES, SAMPLE_BYTES
from runtime.synthesize.checkpoints import synthesize_checkpoint
from runtime.synthesize.tokenizer import byte_level_tokenizer

SHARED_DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
PROMPT_LENGTHS = (5, 17, 3, 30, 11, 8, 9)
NUM_NEW_TOKENS = 7  # two of the prompts grow into another page
NUM_SAMPLED = 3
TEMPERATURE, TOP_P = 0.8, 0.95
CLEAR_MARGIN = 1e-3  # of logits, whose rounding differs by about 1e-5

# Of families those whose lanes, attention, caches or experts differ from one another's.
KINDS_OF_ATTENTION = (
    *("llama", "mistral", "mixtral", "qwen3-next", "deepseek-v3", "opt", "bloom", "falcon, new", "gemma-3", "gpt-oss"),
    *("llama-4", "phi-3", "cohere-2", "jamba", "mamba-2", "lfm-2", "kimi-linear", "t5"),
)
MANY_EXPERTS: dict[str, dict[str, object]] = {  # as many as in the published models, 80 MB and more in a layer
    "glm-4-moe": {
        "n_routed_experts": 160, "num_experts_per_tok": 8, "hidden_size": 256, "moe_intermediate_size": 336,
        "num_hidden_layers": 2,
    },
    "qwen3-next": {
        "num_experts": 512, "num_experts_per_tok": 10, "hidden_size": 256, "moe_intermediate_size": 112,
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip


PRODUCT_KINDS = [str(kind) for kind in backend_product_kinds()]


def always(backend: LinearBackend) -> BackendTable:
    """As if it had been the fastest in every measurement."""
    return BackendTable(rows=[1], multipliers={kind: [backend] for kind in PRODUCT_KINDS})


def synthesize(family: str, directory: Path, **overrides: object) -> Path:
    """Random weights in bf16, the same every time; returns `directory`."""
    row = FAMILIES[family]
    synthesize_checkpoint(model=row.model_type, overrides={**row.overrides, **overrides}, directory=directory, seed=1)
    return directory


def short_bart(directory: Path, num_positions: int) -> PreTrainedModel:
    """An encoder-decoder with tables of so many positions, written to `directory` in float32 with its tokenizer."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=640,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=num_positions,
        decoder_start_token_id=2,
        init_std=0.5,  # by 0.02 hardly anything depends on what the encoder reads
    )
    model = BartForConditionalGeneration(config).eval()
    model.save_pretrained(directory)
    byte_level_tokenizer(640).save_pretrained(directory)
    return model


def in_float32(reference: "Reference", directory: Path) -> "Reference":
    """The same with weights stored as they are computed with, as a device's are."""
    shutil.copytree(reference.directory, directory, dirs_exist_ok=True)
    for path in directory.glob("*.safetensors"):
        save_file({name: tensor.float() for name, tensor in load_file(path).items()}, path)
    return replace(reference, directory=directory)


def made_once(home: Path, make: Callable[[Path], object]) -> Path:
    """`home`, in which `make` has put something for all workers of the session: who comes first calls it, others
    wait."""
    home.mkdir(parents=True, exist_ok=True)
    done = home / "done"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(home)
            done.touch()
    return home


@dataclass(frozen=True, kw_only=True)
class Reference:
    """`expected[i]` are the greedy fp32 tokens that `transformers.generate` gives for `prompts[i]` alone, EOS ignored;
    `sampled[i]` those drawn with the seed that the runtime gives request i."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    sampled: list[list[int]]

    @staticmethod
    def shared(family: Family, home: Path, num_new_tokens: int = NUM_NEW_TOKENS) -> "Reference":
        """Made once in `home`."""

        def make(home: Path) -> None:
            made = Reference.make(family, home / "model", num_new_tokens)
            (home / "answers.json").write_text(json.dumps([made.prompts, made.expected, made.sampled]))

        prompts, expected, sampled = json.loads((made_once(home, make) / "answers.json").read_text())
        return Reference(directory=home / "model", prompts=prompts, expected=expected, sampled=sampled)

    @staticmethod
    def make(family: Family, directory: Path, num_new_tokens: int = NUM_NEW_TOKENS) -> "Reference":
        synthesize_checkpoint(
            model=family.model_type,
            overrides=family.overrides,
            directory=directory,
            seed=1,
            dtype=torch.bfloat16,
            max_shard_bytes=200_000,
        )
        generator = torch.Generator().manual_seed(0)
        model = transformers_model(directory)
        clear = [clear_answer(model, length, generator, num_new_tokens) for length in PROMPT_LENGTHS]
        prompts, expected = [prompt for prompt, _ in clear], [tokens for _, tokens in clear]
        assert len({token for tokens in expected for token in tokens}) > 20, "a model that says little proves little"
        return Reference(
            directory=directory,
            prompts=prompts,
            expected=expected,
            sampled=[sampled(model, prompt, index) for index, prompt in enumerate(prompts[:NUM_SAMPLED])],
        )


def clear_answer(
    model: PreTrainedModel, length: int, generator: torch.Generator, num_new_tokens: int = NUM_NEW_TOKENS
) -> tuple[list[int], list[int]]:
    """A prompt of random tokens, and what `clear_tokens` says to it."""
    while True:
        prompt = torch.randint(5, 600, (length,), generator=generator).tolist()
        if (tokens := clear_tokens(model, prompt, num_new_tokens)) is not None:
            return prompt, tokens


def clear_tokens(model: PreTrainedModel, prompt: list[int], num_new_tokens: int = NUM_NEW_TOKENS) -> list[int] | None:
    """The greedy tokens behind a prompt, if each of them is a clear choice: where two tie to the last bits, so does
    what is right."""
    out = _generate(
        model,
        prompt,
        max_new_tokens=num_new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    is_clear = float((best[:, 0] - best[:, 1]).min()) > CLEAR_MARGIN
    return out.sequences[0, -num_new_tokens:].tolist() if is_clear else None


def transformers_model(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return auto_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory, dtype=dtype).eval()


def greedy(model: PreTrainedModel, prompt: list[int], num_new_tokens: int) -> list[int]:
    return _tokens(model, prompt, max_new_tokens=num_new_tokens, do_sample=False)


def sampled(model: PreTrainedModel, prompt: list[int], index: int) -> list[int]:
    torch.manual_seed(Request(id=str(index), prompt_ids=(1,), max_new_tokens=1).seed(0))
    return _tokens(
        model,
        prompt,
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=True,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        top_k=0,
    )


def _tokens(model: PreTrainedModel, prompt: list[int], **settings: object) -> list[int]:
    first = 1 if model.config.is_encoder_decoder else len(prompt)  # behind an encoder the start token comes first
    return _generate(model, prompt, **settings)[0, first:].tolist()


def _generate(model: PreTrainedModel, prompt: list[int], **settings: object):
    ids = torch.tensor([prompt], device=model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0, **settings)


def flip_outside_samples(file: Path) -> None:
    """A bit halfway between the second and the third place of a file of weights that its fingerprint sees."""
    size = file.stat().st_size
    before, behind = (max(0, size - SAMPLE_BYTES) * turn // (NUM_SAMPLES - 1) for turn in (1, 2))
    place = (before + SAMPLE_BYTES + behind) // 2
    assert before + SAMPLE_BYTES <= place < behind, f"{file}: {size} bytes are all sampled"
    with file.open("r+b") as handle:
        handle.seek(place)
        (byte,) = handle.read(1)
        handle.seek(place)
        handle.write(bytes([byte ^ 1]))
