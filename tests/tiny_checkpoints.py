"""A tiny checkpoint of any config, perturbed wherever a default could hide a mistake, and what transformers answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

LENGTHS = (5, 17, 3, 30, 11, 1, 24)
NUM_NEW_TOKENS = 10
CLEAR_MARGIN = 1e-3  # of logits, whose rounding differs by about 1e-5
NUM_TRIES = 6
MOST_PARAMETERS = 100_000_000
FEWEST_KINDS = 12  # tokens; a model that says little proves little
_DELICATE = ("A_log", "dt_bias", "time_decay", "time_first", ".D", "recurrent_param", "layer_scalar", "slope")


class Silent(Exception):
    """A checkpoint whose answers prove nothing."""


@dataclass(frozen=True, kw_only=True)
class Temper:
    """How random weights are scaled. `gain` of matrices: with more, attention picks a few tokens and what is said
    depends on them; with less, and a head of its own, more of it depends on the last token."""

    gain: float
    is_tied: bool = True  # if the class ties its head


TEMPERS = (
    Temper(gain=1.7),
    Temper(gain=1.0, is_tied=False),
    Temper(gain=0.5, is_tied=False),
    Temper(gain=3.5),
    Temper(gain=0.25, is_tied=False),
)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """`expected[i]`: greedy fp32 tokens of `generate` for `prompts[i]` alone, EOS ignored, each a clear choice.
    `scored`: targets behind prompts, as the class's own forward scores them; empty where it gives none."""

    prompts: list[list[int]]
    expected: list[list[int]]
    scored: list["ScoredTarget"]


@dataclass(frozen=True, kw_only=True)
class ScoredTarget:
    """`logprobs`: of each token of `target` behind `prompt`, in float32. `rounding`: how far the class's own are off
    what it computes in float64; 0 where it does not compute in that."""

    prompt: list[int]
    target: list[int]
    logprobs: list[float]
    rounding: float


def save_tiny(model: PreTrainedModel, directory: Path, temper: Temper = TEMPERS[0]) -> None:
    """Mutates `model`: random weights, norms, biases and persistent buffers; stored in bf16. Generation settings are
    those that every model has, as others are another test's matter."""
    with torch.no_grad():
        randomize(model, torch.Generator().manual_seed(1), temper)
    model = model.to(torch.bfloat16)
    model.generation_config = plain_generation(model.config)
    model.save_pretrained(directory)


def plain_generation(config: PreTrainedConfig) -> GenerationConfig:
    text = config.get_text_config(decoder=True)
    ids = {name: getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    start = getattr(config, "decoder_start_token_id", None)
    start = start if start is None or start < text.vocab_size else 2
    return GenerationConfig(**ids, decoder_start_token_id=2 if config.is_encoder_decoder and start is None else start)


def randomize(model: PreTrainedModel, generator: torch.Generator, temper: Temper) -> None:
    """Scales keep activations near one and logits apart; nothing is left at zeros or ones."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding = getattr(embeddings, "weight", None)
    out = getattr(head, "weight", None)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        width = parameter.shape[-1] if parameter.ndim else 1
        if any(part in name for part in _DELICATE):
            parameter.add_(0.05 * noise * parameter.abs().clamp(max=1))
        elif parameter.ndim < 2:
            parameter.add_(0.1 * noise)
        elif parameter is embedding:
            parameter.copy_(noise * (1.5 * width**-0.5 if embedding is out else 0.5))
        elif parameter is out:
            parameter.copy_(noise * 2 * width**-0.5)
        elif parameter.numel() > 1 and parameter.std() == 0:
            parameter.add_(0.1 * noise)
        elif "conv" in name and parameter.ndim == 3:
            parameter.copy_(noise * 1.5 * (parameter.shape[1] * parameter.shape[2]) ** -0.5)
        else:
            parameter.copy_(temper.gain * noise * (width if "embed" in name else min(parameter.shape[-2:])) ** -0.5)
    saved = set(model.state_dict()) - {name for name, _ in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and buffer.numel() and buffer.abs().max() < 100:
            buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))


def answers(model: PreTrainedModel, vocab_size: int, lengths: Sequence[int] = LENGTHS) -> Answers:
    """Each prompt by itself. Raises Silent where tokens tie, or where there are next to none."""
    generator = torch.Generator().manual_seed(0)
    pairs = [_clear(model, vocab_size, length, generator) for length in lengths]
    kinds = {token for _, tokens in pairs for token in tokens}
    if len(kinds) < FEWEST_KINDS:
        raise Silent(f"says {len(kinds)} tokens only")
    return Answers(
        prompts=[prompt for prompt, _ in pairs],
        expected=[tokens for _, tokens in pairs],
        scored=_scored(model, vocab_size, [prompt for prompt, _ in pairs], generator),
    )


def _scored(
    model: PreTrainedModel, vocab_size: int, prompts: Sequence[list[int]], generator: torch.Generator
) -> list[ScoredTarget]:
    """Random targets of 1 to 17 tokens, most of which no class would choose: so errors of all logits show."""
    lengths = [1 + 4 * (turn % 5) for turn in range(len(prompts))]
    targets = [torch.randint(5, vocab_size - 40, (length,), generator=generator).tolist() for length in lengths]
    try:
        scores = [own_logprobs(model, *pair) for pair in zip(prompts, targets, strict=True)]
    except Exception:  # a class may run in `generate` alone
        return []
    try:
        if hasattr(model.config.get_text_config(decoder=True), "_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products know no float64
        exact = [own_logprobs(model.double(), *pair) for pair in zip(prompts, targets, strict=True)]
    except Exception:  # or in float32
        exact = scores
    finally:
        model.float()
    return [
        ScoredTarget(
            prompt=prompt,
            target=target,
            logprobs=logprobs_T.tolist(),
            rounding=float((logprobs_T - exact_T).abs().max()),
        )
        for prompt, target, logprobs_T, exact_T in zip(prompts, targets, scores, exact, strict=True)
    ]


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, prompt: list[int], target: list[int]) -> torch.Tensor:
    """Log-probabilities (T,) of a target's tokens by one forward of the class, in its own precision."""
    if model.config.is_encoder_decoder:
        assert model.generation_config is not None
        decoded = torch.tensor([[model.generation_config.decoder_start_token_id, *target[:-1]]])
        logits_TV = model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoded).logits[0]
    else:
        logits_TV = model(input_ids=torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(target)[:, None])[:, 0]


def _clear(
    model: PreTrainedModel, vocab_size: int, length: int, generator: torch.Generator
) -> tuple[list[int], list[int]]:
    for _ in range(NUM_TRIES):
        prompt = torch.randint(5, vocab_size - 40, (length,), generator=generator).tolist()
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW_TOKENS,
            eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.cat([logits.float() for logits in out.logits]).topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > CLEAR_MARGIN:
            return prompt, out.sequences[0, -NUM_NEW_TOKENS:].tolist()
    raise Silent(f"chooses no token clearly behind {length} others")
