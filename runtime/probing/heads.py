"""The head of a transformers class, which determines the tasks of a checkpoint."""

from contextlib import suppress
from enum import Enum

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from .empty_weights import PROBE_ERRORS, ProbeEnded, copy_with_random_values
from .layer_lists import decoder_config, layer_lists

NUM_TOKENS = 4


class Head(Enum):
    """What a model computes from the last hidden states. `text`: logits of the next token; `classes`: class logits of
    the whole prompt; `masks`: logits of masked tokens; `none`: nothing, the hidden states are the output."""

    text = "text"
    classes = "classes"
    masks = "masks"
    none = "none"


AUTO: dict[Head, type[_BaseAutoModelClass]] = {
    Head.classes: AutoModelForSequenceClassification,
    Head.masks: AutoModelForMaskedLM,
    Head.none: AutoModel,
}


def saved_head(config: PreTrainedConfig) -> Head:
    """The head of the class that `config` names in `architectures`, with these exceptions:

    - An encoder saved alone (T5EncoderModel) has none.
    - Any other encoder-decoder has a text head.
    - A decoder saved without a head has a text head if its embeddings are tied.
    - A multimodal model saved without a head has a text head. Its decoder has a nested config.
    """
    names = set(getattr(config, "architectures", None) or ())
    if encoder_class(config) in names:
        return Head.none
    if config.is_encoder_decoder:
        return Head.text
    is_multimodal = decoder_config(config) is not config
    is_decoder = (
        type(config) in AutoModelForCausalLM._model_mapping and getattr(config, "is_decoder", True) is not False
    )
    has_text = is_multimodal or (is_decoder and getattr(config, "tie_word_embeddings", True))
    for head in AUTO:
        if names & _class_names(AUTO[head], config) and not (head is Head.none and has_text):
            return head
    return Head.text


def model_head(model: PreTrainedModel) -> Head:
    """The head of a model's class."""
    if model.can_generate():
        return Head.text
    name = type(model).__name__
    if name == encoder_class(model.config):
        return Head.none
    return next((head for head, auto in AUTO.items() if name in _class_names(auto, model.config)), Head.text)


def encoder_class(config: PreTrainedConfig) -> str | None:
    """The name of transformers' encoder-only class; None if there is none."""
    names = _class_names(AutoModelForTextEncoding, config) - _class_names(AutoModel, config)
    return next(iter(names), None)


def _class_names(auto: type[_BaseAutoModelClass], config: PreTrainedConfig) -> set[str]:
    """The names of the classes that `auto` may choose for `config`, without causal language models (`...LMHeadModel`):
    AutoModelForMaskedLM lists those of XLM and FlauBERT, which have a text head."""
    mapping = auto._model_mapping
    if mapping is None or type(config) not in mapping:
        return set()
    classes = mapping[type(config)]
    classes = classes if isinstance(classes, tuple | list) else (classes,)
    names = {each.__name__ for each in classes if each is not None}
    return {name for name in names if not name.endswith("LMHeadModel")}


def looks_ahead(model: PreTrainedModel) -> bool:
    """True if a hidden state depends on later tokens. Tests whether changing the last token changes the first hidden
    state of a copy of the first layers; returns False if the copy does not run."""
    ids_1S = torch.arange(5, 5 + NUM_TOKENS)[None]
    others_1S = torch.where(ids_1S == ids_1S.max(), 4, ids_1S)
    try:
        probe = copy_with_random_values(model)
        return bool((_first_hidden_state(probe, ids_1S) - _first_hidden_state(probe, others_1S)).abs().max() > 0)
    except PROBE_ERRORS:
        return False


@torch.no_grad()
def _first_hidden_state(probe: PreTrainedModel, ids_1S: torch.Tensor) -> torch.Tensor:
    """The hidden state of the first token after the last layer of the copy `probe`."""
    hidden_states = list[torch.Tensor]()

    def record_output(module: torch.nn.Module, given: object, out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        hidden_states.append(out[0] if isinstance(out, tuple) else out)

    handles = [layer.register_forward_hook(record_output) for layer in layer_lists(probe)[0].layers]
    with suppress(ProbeEnded):
        probe(input_ids=ids_1S)
    for handle in handles:
        handle.remove()
    return hidden_states[-1][0, 0]
