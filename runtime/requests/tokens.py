"""Tokenises texts, in memory that no single text decides."""

from collections.abc import Sequence

from ..errors import CheckpointError
from ..model.loading import LoadedModel
from ..origin.net import PASS_ON, reason_of

SEGMENT_CHARACTERS = 1 << 18  # tokenised on their own, to see whether a long text can fit at all
CUT_TOKENS = 256  # by how many a cut between two segments may change the count: a word's tokens, with room


def tokenize(model: LoadedModel, texts: Sequence[str], *, is_rendered: bool = False) -> list[tuple[int, ...]]:
    """Token ids of each text, with the tokenizer's own special tokens, which a text out of a chat template has already
    (`is_rendered`). Equal ids are one object, in all of these texts."""
    if not texts:
        return []
    if model.tokenizer is None:
        raise CheckpointError(f"{model.checkpoint.path} has no tokenizer; set model.tokenizer, or give token ids")
    if not texts:
        return []
    found = model.tokenizer(
        list(texts), add_special_tokens=not is_rendered, return_attention_mask=False, return_token_type_ids=False
    )["input_ids"]
    shared: dict[int, int] = {}
    return [tuple(map(shared.setdefault, ids, ids)) for ids in found]


def tokenize_each(
    model: LoadedModel, texts: Sequence[str], *, is_rendered: bool, most_tokens: int | None
) -> list[tuple[int, ...] | str]:
    """The ids of each text, or why it has none: it is certain to have more than `most_tokens`, or the tokenizer raises.

    Everything that a tokenizer raises is caught, also what is no Exception (a panic of the tokenizers library): it is
    about one text, and others can go on.
    """
    try:
        found: list[tuple[int, ...] | str] = [_too_long(model, text, most_tokens) or "" for text in texts]
        short = [index for index, reason in enumerate(found) if not reason]
        ids = tokenize(model, [texts[index] for index in short], is_rendered=is_rendered)
    except (*PASS_ON, CheckpointError):
        raise
    except BaseException as error:
        if len(texts) == 1:
            return [f"the model's tokenizer refuses the prompt: {reason_of(error)}"]
        return [tokenize_each(model, [text], is_rendered=is_rendered, most_tokens=most_tokens)[0] for text in texts]
    for index, each in zip(short, ids, strict=True):
        found[index] = each
    return found


def _too_long(model: LoadedModel, text: str, most_tokens: int | None) -> str:
    """Counts a long text segment by segment until it is certain; what has one segment is left to the whole count."""
    if most_tokens is None or len(text) <= SEGMENT_CHARACTERS:
        return ""
    num_tokens = 0
    for begin in range(0, len(text), SEGMENT_CHARACTERS):
        [ids] = tokenize(model, [text[begin : begin + SEGMENT_CHARACTERS]], is_rendered=True)
        num_tokens += max(0, len(ids) - CUT_TOKENS)
        if num_tokens > most_tokens:
            return (
                f"the prompt has {len(text):,} characters and more than {num_tokens:,} tokens; the model's context of "
                f"{most_tokens:,} leaves none to generate"
            )
    return ""
