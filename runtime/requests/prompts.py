"""Tokenizes prompts and makes generation requests, or rejects them with a reason."""

from collections.abc import Sequence
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from ..checkpoint_source.download import PASS_ON, short_reason
from ..config.settings import SamplingConfig, SamplingOverrides, require
from ..errors import CheckpointError, ConfigError
from ..model.loading import LoadedModel
from ..sequences.grammar import llguidance_tokenizer, make_grammar
from ..sequences.sequence import FinishReason, Request, TokenLogprobs

# A long text is tokenized in segments of so many characters, to find out whether it is too long.
SEGMENT_CHARACTERS = 1 << 18
CUT_TOKENS = 256  # upper bound for the additional tokens that cutting a text into segments gives per segment


def tokenize(model: LoadedModel, texts: Sequence[str], *, is_rendered: bool = False) -> list[tuple[int, ...]]:
    """Token ids of each text. Special tokens are added unless `is_rendered` (a chat template has added them)."""
    if not texts:
        return []
    if model.tokenizer is None:
        raise CheckpointError(f"{model.checkpoint.path} has no tokenizer; set model.tokenizer, or give token ids")
    token_lists = model.tokenizer(
        list(texts), add_special_tokens=not is_rendered, return_attention_mask=False, return_token_type_ids=False
    )["input_ids"]
    shared: dict[int, int] = {}  # equal ids share one int object, to save memory
    return [tuple(map(shared.setdefault, ids, ids)) for ids in token_lists]


def tokenize_each(
    model: LoadedModel, texts: Sequence[str], *, is_rendered: bool, max_tokens: int | None
) -> list[tuple[int, ...] | str]:
    """Token ids of each text, or a str with the error: the tokenizer failed, or the text has certainly more than
    `max_tokens` tokens."""
    try:
        results: list[tuple[int, ...] | str] = [_length_error(model, text, max_tokens) or "" for text in texts]
        short = [index for index, reason in enumerate(results) if not reason]
        ids = tokenize(model, [texts[index] for index in short], is_rendered=is_rendered)
    except (*PASS_ON, CheckpointError):
        raise
    except BaseException as error:  # also a panic of the tokenizers library: other texts must still be tokenized
        if len(texts) == 1:
            return [f"the model's tokenizer refuses the prompt: {short_reason(error)}"]
        return [tokenize_each(model, [text], is_rendered=is_rendered, max_tokens=max_tokens)[0] for text in texts]
    for index, token_ids in zip(short, ids, strict=True):
        results[index] = token_ids
    return results


def _length_error(model: LoadedModel, text: str, max_tokens: int | None) -> str:
    """Error for a text that certainly has more than `max_tokens` tokens, else "". Texts of up to one segment are not
    counted."""
    if max_tokens is None or len(text) <= SEGMENT_CHARACTERS:
        return ""
    num_tokens = 0
    for begin in range(0, len(text), SEGMENT_CHARACTERS):
        [ids] = tokenize(model, [text[begin : begin + SEGMENT_CHARACTERS]], is_rendered=True)
        num_tokens += max(0, len(ids) - CUT_TOKENS)
        if num_tokens > max_tokens:
            return (
                f"the prompt has {len(text):,} characters and more than {num_tokens:,} tokens; the model's context of "
                f"{max_tokens:,} leaves no room to generate"
            )
    return ""


MAX_SHOWN = 200  # limit for the text of a prompt's own settings in a message


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A prompt that cannot be used, and the reason (`error`). Has the same attributes as a failed `Completion`."""

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
    """Makes the request for the first sample of a prompt, or rejects it. `overrides`: the prompt's own settings. Raises
    ConfigError for invalid settings of the run."""
    try:
        own = sampling.with_overrides(overrides)
        grammar = make_grammar(own)
    except ConfigError as error:
        shown = str(overrides.given)
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
        return Rejected(id=id, error=f"its own settings {shown}: {error}")
    if grammar is not None:  # raises ConfigError if the tokenizer does not support grammars
        llguidance_tokenizer(model.tokenizer, model.shape.vocab_size, model.eos_token_ids)
    require(not own.stop or model.tokenizer is not None, "stop strings need a tokenizer; set model.tokenizer")
    if prompt == "":
        return Rejected(id=id, error="the prompt is empty")
    ids = tokenize(model, [prompt])[0] if isinstance(prompt, str) else tuple(prompt)
    context = model.shape.context_tokens
    error = None if ids else "the prompt has no tokens"
    if own.max_new_tokens > 0 and len(ids) >= context:
        error = f"the prompt has {len(ids):,} tokens; the model's context of {context:,} leaves no room to generate"
    error = error or vocabulary_error(model, ids)
    if error is not None:
        return Rejected(id=id, error=error, num_prompt_tokens=len(ids))
    return Request(
        id=id,
        prompt_ids=ids,
        max_new_tokens=max(0, min(own.max_new_tokens, context - len(ids))),
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


def vocabulary_error(model: LoadedModel, ids: tuple[int, ...]) -> str | None:
    """Error if a token id is outside the vocabulary, else None."""
    vocab_size = model.shape.vocab_size
    if min(ids) >= 0 and max(ids) < vocab_size:
        return None
    outside = next(token for token in ids if not 0 <= token < vocab_size)
    return f"token id {outside} is outside the model's vocabulary of {vocab_size:,}"
