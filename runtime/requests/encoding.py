"""Requests that compute a vector, class scores or mask predictions from a prompt, and checks that the model supports
them."""

import json
import logging
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from ..config.settings import Pooling, Readout
from ..errors import ConfigError, require
from ..model.loading import LoadedModel
from ..probing.heads import Head, encoder_class
from ..sequences.sequence import Encoding, Request
from .prompts import Rejected, vocabulary_error

log = logging.getLogger(__name__)

POOLING_FILE = "1_Pooling/config.json"  # sentence-transformers' pooling config
DENSE_FOLDER = "2_Dense"  # dense layer after pooling, in some checkpoints
POOLING_KEYS = {
    "pooling_mode_cls_token": Pooling.cls,
    "pooling_mode_mean_tokens": Pooling.mean,
    "pooling_mode_lasttoken": Pooling.last,
}
CALLS = {  # kind of head -> the calls that support it
    Head.classes: "Runtime.classify or Runtime.embed",
    Head.masks: "Runtime.fill_masks or Runtime.embed",
    Head.none: "Runtime.embed",
}
OUTPUTS = {  # kind of head -> the setting encode.output of `weightstream encode`
    Head.classes: Readout.classes,
    Head.masks: Readout.masks,
    Head.none: Readout.embedding,
}


@dataclass(frozen=True, kw_only=True)
class EncodingSpec:
    """What to compute from each prompt. `pooling`: None uses the checkpoint's setting; without one, the mean for
    encoders and the last token for decoders. `normalize`: scale vectors to length 1. `num_top`: tokens per mask."""

    readout: Readout = Readout.embedding
    pooling: Pooling | None = None
    normalize: bool = False
    num_top: int = 1


def require_text(model: LoadedModel) -> None:
    """Raises ConfigError if the checkpoint's class does not generate text."""
    if model.head is Head.text:
        return
    name = type(model.staged.model).__name__
    output = OUTPUTS[model.head]
    raise ConfigError(
        f"model.path: {name} generates no text: in Python, call {CALLS[model.head]}; "
        f"for the rows of a data set, run weightstream encode encode.output={output.value}"
    )


def require_readable(model: LoadedModel, spec: EncodingSpec) -> None:
    """Raises ConfigError if the model's class or tokenizer does not support `spec`."""
    name = type(model.staged.model).__name__
    encoder = encoder_class(model.staged.model.config)
    hint = "transformers has no class for its encoder" if encoder is None else "open its encoder: Runtime(encodes=True)"
    is_single = model.start_token_id is None
    require(is_single, f"model.path: {name} is an encoder-decoder; only an encoder's states are pooled: {hint}")
    if (model.checkpoint.path / DENSE_FOLDER).exists():
        path = model.checkpoint.path
        log.warning("%s: the dense layer of sentence-transformers in %s is not applied to vectors", path, DENSE_FOLDER)
    if spec.readout is Readout.classes:
        require(model.head is Head.classes, f"model.path: {name} has no classes; use a *ForSequenceClassification")
    if spec.readout is Readout.masks:
        require(model.head is Head.masks, f"model.path: {name} fills no masks; use a *ForMaskedLM")
        require(mask_id(model) is not None, "the tokenizer has no mask token; set model.tokenizer to one with it")


def mask_id(model: LoadedModel) -> int | None:
    return getattr(model.tokenizer, "mask_token_id", None)


def make_encoding(model: LoadedModel, id: str, prompt_ids: Rows[int], spec: EncodingSpec) -> Request | Rejected:
    """Makes the request for one prompt, or rejects it."""
    ids = tuple(prompt_ids)
    context = model.shape.context_tokens
    if not ids:
        error = "the prompt has no tokens"
    elif len(ids) > context:
        error = f"the prompt has {len(ids):,} tokens; the limit is the model's context of {context:,}"
    else:
        error = vocabulary_error(model, ids)
    if error is None and spec.readout is Readout.masks and mask_id(model) not in ids:
        error = f"the prompt has no mask token {getattr(model.tokenizer, 'mask_token', None)!r}"
    if error is not None:
        return Rejected(id=id, error=error, num_prompt_tokens=len(ids))
    if spec.readout is Readout.masks:
        masked = tuple(position for position, token in enumerate(ids) if token == mask_id(model))
        encoding = Encoding(num_read=len(masked), masked=masked, num_top=spec.num_top)
    elif spec.readout is Readout.classes:
        encoding = Encoding(num_read=1, has_classes=True)
        pad_id = getattr(model.staged.model.config, "pad_token_id", None)
        # transformers reads the last token that is not padding. With causal attention, tokens after it have no effect.
        while not model.looks_ahead and len(ids) > 1 and ids[-1] == pad_id:
            ids = ids[:-1]
    else:
        pooling = spec.pooling or checkpoint_pooling(model)
        num_read = 1 if pooling is Pooling.last else len(ids)
        encoding = Encoding(num_read=num_read, pooling=pooling, normalize=spec.normalize)
    return Request(id=id, prompt_ids=ids, max_new_tokens=1, encoding=encoding)


def checkpoint_pooling(model: LoadedModel) -> Pooling:
    """The pooling in the checkpoint's sentence-transformers config. Without such a file, the mean for encoders and the
    last token for decoders. Raises ConfigError for an unknown pooling."""
    path = model.checkpoint.path / POOLING_FILE
    if not path.is_file():
        return Pooling.mean if model.looks_ahead else Pooling.last
    try:
        config = json.loads(path.read_bytes())
        modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}; set pooling") from error
    require(len(modes) == 1 and modes[0] in POOLING_KEYS, f"{path} pools by {', '.join(modes)}: set pooling")
    return POOLING_KEYS[modes[0]]
