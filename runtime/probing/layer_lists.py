"""Finds the layers of a model of any class, and reads its decoder's config, which may be nested in another config or
have values per layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

from ..errors import ConfigError
from ..plan.shape.shapes import StageKind


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text decoder: nested in `config`, or `config` itself."""
    return config.get_text_config(decoder=True)


def config_behind_encoder(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of an encoder-decoder's decoder. If the decoder has none (FSMT), the config of the whole model."""
    return getattr(model.get_decoder(), "config", model.config)


def encoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the encoder: nested in `config`, or `config` itself."""
    nested = getattr(config, "encoder", None)
    return nested if isinstance(nested, PreTrainedConfig) else config.get_text_config(encoder=True)


def max_over_layers(config: PreTrainedConfig, name: str) -> int | None:
    """The largest value over layers of the config entry `name`; None if there is none."""
    try:
        value = getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        value = [getattr(layer, name, None) for layer in config.per_layer_config]
    if isinstance(value, list | tuple):
        return max((each for each in value if each), default=None)
    return value or None


def head_size(config: PreTrainedConfig) -> int:
    """The number of elements of a key of one head, the largest over layers."""
    return max_over_layers(config, "head_dim") or config.hidden_size // num_attention_heads(config)


def num_attention_heads(config: PreTrainedConfig) -> int:
    """The number of attention heads, the largest over layers; 1 for configs without heads, as of recurrent models."""
    return max_over_layers(config, "num_attention_heads") or 1


@dataclass(frozen=True, kw_only=True)
class LayerList:
    """The `layers` of the decoder or encoder, with their path in the model. `kind`: layers of an encoder or decoder."""

    kind: StageKind
    path: str
    layers: torch.nn.ModuleList


def layer_lists(model: PreTrainedModel) -> list[LayerList]:
    """The decoder's layers, after the encoder's if there is one. Raises ConfigError if none is found."""
    if not model.config.is_encoder_decoder:
        decoder = model.get_decoder()
        # Some classes' get_decoder returns the output projection, which has no layers: search the whole model then.
        root = model if not _module_lists(model, decoder) else decoder
        return [_find_layers(model, root, StageKind.layer)]
    parts = ((model.get_encoder(), StageKind.encoder), (model.get_decoder(), StageKind.layer))
    return [_find_layers(model, part, kind) for part, kind in parts]


def stage_kinds(lists: Sequence[LayerList]) -> tuple[StageKind, ...]:
    """The kind of each stage, in the order of the forward pass. A stage is the weights of one part of the forward. The
    bridge, between encoder and decoder, is the encoder's norm and the decoder's embeddings."""
    kinds = [StageKind.embedding]
    for layer_list in lists:
        if layer_list.kind is StageKind.layer and StageKind.encoder in kinds:
            kinds.append(StageKind.bridge)
        kinds += [layer_list.kind] * len(layer_list.layers)
    return (*kinds, StageKind.head)


def _find_layers(model: PreTrainedModel, part: torch.nn.Module, kind: StageKind) -> LayerList:
    """Finds the list of layers in `part`: the first module list with items of a class in `_no_split_modules`, else the
    list with the most parameters. Raises ConfigError if there is no list, or if layers are spread over several."""
    names = set(model._no_split_modules or ())
    lists = _module_lists(model, part)
    for path, layers in lists.items():
        if type(layers[0]).__name__ in names:
            return LayerList(kind=kind, path=path, layers=layers)
    outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    if not outermost:
        raise ConfigError(
            f"model.path: {type(model).__name__} has no list of {kind.value}s (_no_split_modules={sorted(names)}), "
            "so it cannot be streamed layer by layer"
        )
    largest = max(outermost, key=lambda path: sum(parameter.numel() for parameter in lists[path].parameters()))
    owner = largest.rpartition(".")[0]
    siblings = [path for path in outermost if path.rpartition(".")[0] == owner and len(lists[path]) > 1]
    parallel = [path for path in siblings if len(lists[path]) == len(lists[siblings[0]])]
    if len(parallel) > 1:  # lists of the same length in one module: a layer is one item of each list (XLM)
        raise ConfigError(
            f"model.path: {type(model).__name__} spreads its layers over {' and '.join(parallel)}, "
            "so it cannot be streamed layer by layer"
        )
    return LayerList(kind=kind, path=largest, layers=lists[largest])


def _module_lists(model: PreTrainedModel, part: torch.nn.Module) -> dict[str, torch.nn.ModuleList]:
    """The module lists in `part`: path in the model -> list, outer lists first. Only lists in which each item has
    submodules and parameters. Skips vision and audio towers, whose configs have another class than the text model's."""
    configs = (model.config, decoder_config(model.config), getattr(part, "config", None))
    kinds = {type(config) for config in configs}
    towers = [each for each in part.modules() if isinstance(each, PreTrainedModel) and type(each.config) not in kinds]
    inside = set(part.modules()) - {module for tower in towers for module in tower.modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if module in inside
        and isinstance(module, torch.nn.ModuleList)
        and len(module)
        and all(any(True for _ in item.children()) and any(True for _ in item.parameters()) for item in module)
    }
