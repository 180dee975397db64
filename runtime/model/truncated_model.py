"""Truncates a model to its first layers, to check its class with the checkpoint's weights in little memory and time.
Attention windows, chunks and LongRoPE's limit are shortened, so that a few tokens exceed them.

Also drops the vision and audio towers of multimodal models, and their projections, which text prompts do not use.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from ..errors import ConfigError
from ..plan.shape.model import ModelShape
from ..plan.shape.shapes import Parameter, Stage, StageKind
from ..probing.layer_lists import decoder_config, layer_lists
from ..store.checkpoint import Checkpoint
from ..store.reader import Fill
from ..weights.layout import match_tensors
from ..weights.stage_weights import load_tensor

log = logging.getLogger(__name__)

SHORT_WINDOW, SHORT_LIMIT = 7, 10  # tokens: of windows and chunks, of LongRoPE's limit
# Names in configs.
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
NO_CONTEXT = 1 << 30  # context length of configs without one


@dataclass(frozen=True, kw_only=True)
class TruncatedModel:
    """How to truncate a model."""

    num_layers: int  # to keep of each layer list (encoder, decoder)
    is_packed: bool  # use packed lanes, as the whole model does

    def shorten(self, config: PreTrainedConfig) -> None:
        """Shortens `config` and nested configs in place."""
        nested = (value for value in vars(config).values() if isinstance(value, PreTrainedConfig))
        for part in [config, *nested]:
            context = getattr(part, "max_position_embeddings", None) or NO_CONTEXT
            for name in WINDOWS:
                window = getattr(part, name, None)
                if isinstance(window, int) and SHORT_WINDOW < window < context:  # a longer one may have no effect
                    setattr(part, name, SHORT_WINDOW)
            rope = getattr(part, "rope_parameters", None)
            for parameters in [rope, *rope.values()] if isinstance(rope, dict) else []:
                if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
                    parameters["original_max_position_embeddings"] = SHORT_LIMIT
                    if isinstance(getattr(part, "original_max_position_embeddings", None), int):
                        setattr(part, "original_max_position_embeddings", SHORT_LIMIT)  # noqa: B010 - not declared
            depths = {name: getattr(part, name, None) for name in LAYER_COUNTS}
            too_deep = {depth for depth in depths.values() if isinstance(depth, int) and depth > self.num_layers}
            for name, value in list(vars(part).items()):
                if isinstance(value, list | tuple) and len(value) in too_deep:  # a list with one item per layer
                    setattr(part, name, value[: self.num_layers])
            for name, depth in depths.items():
                if isinstance(depth, int) and depth > self.num_layers:
                    setattr(part, name, self.num_layers)

    def cut(self, model: PreTrainedModel) -> None:
        """Removes layers that the class created regardless of the shortened config. Mutates `model`."""
        for layer_list in layer_lists(model):
            del layer_list.layers[self.num_layers :]


def num_representative_layers(shape: ModelShape, config: PreTrainedConfig) -> int:
    """Returns the number of first layers that include every kind of layer, by parameter shapes and layer type. At least
    two, so that a layer's output is another layer's input."""
    layers = shape.layers
    types = getattr(config.get_text_config(decoder=True), "layer_types", None)
    if not isinstance(types, list) or len(types) != len(layers):
        types = [None] * len(layers)
    kinds = [(_parameter_shapes(layer), kind) for layer, kind in zip(layers, types, strict=True)]
    return max(min(2, len(kinds)), 1 + max(kinds.index(kind) for kind in set(kinds)))


def _parameter_shapes(stage: Stage) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Returns names and shapes of a stage's parameters, without the layer number and what precedes it in names."""
    paths = [parameter.name.split(".") for parameter in stage.parameters]
    number_indices = [i for i, step in enumerate(paths[0]) if step.isdigit()] if paths else []
    first = number_indices[0] + 1 if number_indices else 0
    return frozenset((".".join(path[first:]), p.shape) for path, p in zip(paths, stage.parameters, strict=True))


def dense_bytes(shape: ModelShape, num_layers: int) -> int:
    """Returns the bytes of the truncated model in float32, plus a temporary copy of the largest weight."""
    stages: list[Stage] = [stage for stage in shape.stages if not stage.kind.is_layer]
    for kind in (StageKind.encoder, StageKind.layer):
        stages += shape.stages_of_kind(kind)[:num_layers]
    parameters = [parameter for stage in stages for parameter in (*stage.parameters, *stage.tables)]
    sizes = [4 * parameter.num_elements for parameter in parameters]
    return sum(sizes) + max(sizes, default=0)


def load_parameters(
    model: PreTrainedModel,
    parameters: Mapping[str, Parameter],
    checkpoint: Checkpoint,
    virtual_files: Mapping[str, Fill],
) -> None:
    """Loads all parameters and buffers from the checkpoint, dequantized. Mutates `model`; tied parameters are read
    once. `virtual_files`: files that exist only in memory. Raises KeyError for a parameter missing in `parameters`."""
    loaded: dict[tuple[str, ...], nn.Parameter] = {}  # by tensors in the checkpoint: tied parameters share one tensor
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if isinstance(tensor, nn.Parameter) and tensor.is_meta:
            parameter = parameters[name]
            source = tuple(f"{piece.file} {piece.name}" for piece in parameter.slices)
            if source not in loaded or loaded[source].shape != tensor.shape:
                entries = [  # one per expert; a parameter that is not stacked has one
                    torch.cat([load_tensor(piece, virtual_files) for piece in blocks]) for blocks in parameter.pieces
                ]
                whole = torch.stack(entries) if parameter.is_stacked else entries[0]
                whole = whole.to(tensor.dtype).reshape(tensor.shape)
                loaded[source] = nn.Parameter(whole, requires_grad=False)
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = loaded[source]
    if checkpoint.gguf is None:
        plain, _ = match_tensors(model, checkpoint.tensors, get_model_conversion_mapping(model))
        for name, buffer in model.named_buffers():
            if name in state and name in plain:
                buffer.copy_(load_tensor(plain[name]).view(buffer.shape))


class UnusedModule(nn.Module):
    """Replaces a module that text prompts do not use; its weights are not loaded. Running it raises ConfigError."""

    def __init__(self, inner: nn.Module, name: str):
        super().__init__()
        self._inner = (inner,)  # in a tuple: not a child, so its parameters leave the model
        self._name = name

    def __getattr__(self, name: str):  # model code reads attributes of its modules
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_inner"][0], name)

    def forward(self, *args: object, **kwargs: object) -> object:
        raise ConfigError(
            f"model.path: the class runs {self._name} ({type(self._inner[0]).__name__}) although all prompts are text; "
            "only the text decoder of a multimodal model is loaded"
        )


def drop_unused_modules(model: PreTrainedModel) -> None:
    """Drops the weights of a multimodal model outside its text decoder and head. Mutates `model`."""
    decoder = model.get_decoder()
    if model.config.is_encoder_decoder or decoder_config(model.config) is model.config or decoder is model:
        return
    used = set(decoder.modules())
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        used |= set(module.modules()) if module is not None else set()
    _drop_weights(model, "", used)


def _drop_weights(module: nn.Module, path: str, used: set[nn.Module]) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, None)
    for name, child in list(module.named_children()):
        child_path = f"{path}.{name}" if path else name
        if child not in used and not used.isdisjoint(child.modules()):
            _drop_weights(child, child_path, used)
        elif child not in used and any(True for _ in child.parameters()):
            setattr(module, name, UnusedModule(child, child_path))
