"""What a config says of the decoder that generates, however deep it is nested, and mixed from layer to layer."""

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Its own, or that of the text decoder in it."""
    return config.get_text_config(decoder=True)


def config_behind_encoder(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of an encoder-decoder's decoder; FSMT's decoder is no model of its own, and has the whole model's."""
    return getattr(model.get_decoder(), "config", model.config)


def encoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same of the encoder in front of it."""
    nested = getattr(config, "encoder", None)
    return nested if isinstance(nested, PreTrainedConfig) else config.get_text_config(encoder=True)


def largest(config: PreTrainedConfig, name: str) -> int | None:
    """The largest of a size that layers may have different ones of. None where there is none."""
    try:
        value = getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        value = [getattr(layer, name, None) for layer in config.per_layer_config]
    if isinstance(value, list | tuple):
        return max((each for each in value if each), default=None)
    return value or None


def head_size(config: PreTrainedConfig) -> int:
    """Numbers in a key, of the layer with the widest."""
    return largest(config, "head_dim") or config.hidden_size // num_attention_heads(config)


def num_attention_heads(config: PreTrainedConfig) -> int:
    """The heads of the layer with the most; 1 where a config has no such thing, as those of recurrent models."""
    return largest(config, "num_attention_heads") or 1
