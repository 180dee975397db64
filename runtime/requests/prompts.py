"""Makes requests of prompts, or says why there is none."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from ..config.settings import SamplingConfig, SamplingOverrides, require
from ..errors import ConfigError
from ..model.loading import LoadedModel
from ..sequences.grammar import grammar_of, tokens_of
from ..sequences.sequence import FinishReason, Request, TokenLogprobs
from .tokens import tokenize

MAX_SHOWN = 200  # characters of what a request asks, in a message


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A prompt that cannot be generated from, and why. It reads like a completion that ended by an error before its
    first token."""

    id: str
    error: str
    num_prompt_tokens: int = 0
    sample_index: int = 0
    prompt_index: int = 0

    @property
    def is_ok(self) -> bool:
        return False

    @property
    def text(self) -> str:
        return ""

    @property
    def reasoning(self) -> None:
        return None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return ()

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return ()

    @property
    def finish(self) -> FinishReason:
        return FinishReason.error

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.sample_index


def make_request(
    model: LoadedModel, sampling: SamplingConfig, id: str, prompt: str | Rows[int], overrides: SamplingOverrides
) -> Request | Rejected:
    """The first sample's. Raises ConfigError where the run, rather than the prompt, is at fault."""
    try:
        own = sampling.overridden(overrides)
        grammar = grammar_of(own)
    except ConfigError as error:
        return Rejected(id=id, error=f"its own {shortened(overrides)}: {error}")
    if grammar is not None:
        tokens_of(model.tokenizer, model.shape.vocab_size, model.eos_token_ids)
    require(
        not own.stop or model.tokenizer is not None, "stop strings need a tokenizer to see text; set model.tokenizer"
    )
    if prompt == "":
        return Rejected(id=id, error="the prompt is empty")
    ids = tokenize(model, [prompt])[0] if isinstance(prompt, str) else tuple(prompt)
    room = model.shape.context_tokens - len(ids)
    error = _problem(model, ids, needs_room=own.max_new_tokens > 0)
    if error is not None:
        return Rejected(id=id, error=error, num_prompt_tokens=len(ids))
    return Request(
        id=id,
        prompt_ids=ids,
        max_new_tokens=max(0, min(own.max_new_tokens, room)),
        temperature=own.temperature or 0.0,
        stop=tuple(own.stop or ()),
        own_seed=overrides.seed,
        top_p=overrides.top_p,
        top_k=overrides.top_k,
        min_p=overrides.min_p,
        repetition_penalty=overrides.repetition_penalty,
        min_new_tokens=overrides.min_new_tokens,
        ignore_eos=own.ignore_eos,
        grammar=grammar,
        num_beams=own.num_beams or 1,
    )


def shortened(overrides: SamplingOverrides) -> str:
    """What a request asks otherwise than the run, for a message."""
    shown = str(overrides.given)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


def _problem(model: LoadedModel, ids: tuple[int, ...], *, needs_room: bool) -> str | None:
    context = model.shape.context_tokens
    if not ids:
        return "the prompt has no tokens"
    if needs_room and len(ids) >= context:
        return f"the prompt has {len(ids):,} tokens; the model's context of {context:,} leaves none to generate"
    return outside_vocabulary(model, ids)


def outside_vocabulary(model: LoadedModel, ids: tuple[int, ...]) -> str | None:
    """What is wrong with token ids that the model does not have."""
    vocab_size = model.shape.vocab_size
    if min(ids) >= 0 and max(ids) < vocab_size:
        return None
    outside = next(token for token in ids if not 0 <= token < vocab_size)
    return f"token id {outside} is outside the model's vocabulary of {vocab_size:,}"
