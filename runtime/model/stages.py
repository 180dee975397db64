"""Splits a model into stages: wraps each layer, and each module with weights outside the layers (outer module), in a
`StreamedModule`, which requests the stage's weights when the model's forward calls it.

A stage is the weights of one part of the forward: embeddings, one layer, or norm and head. Dry runs find the outer
modules that run before the layers.

In the last decoder layer all tokens store keys and values. After that, the layer computes only the tokens that the head
needs (selected tokens): decoded tokens, and the last token of a finished prompt. With L layers this saves almost 1/L of
a prefill. It is valid for any class, since tokens are independent outside of attention.

Letters: T tokens of a pass, B selected tokens.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from transformers import PreTrainedModel

from ..cache.paged import LayerStored, PagedKV
from ..errors import ConfigError
from ..events import LaneRun, NeedStage, Weights, need_stage
from ..linear.blocks import Block
from ..linear.fused_projections import FusedProjections
from ..linear.stored import StoredWeight
from ..plan.cost.lane_work import can_skip_unselected
from ..plan.shape.shapes import StageKind
from ..probing.layer_lists import encoder_config, layer_lists, stage_kinds

EMBEDDING = 0  # number of the first stage
NO_FUSION = nullcontext()
ForwardOverride: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], object]
_Tensors: TypeAlias = dict[str, torch.Tensor | None]  # a module's parameters or buffers, by name


@dataclass(frozen=True, kw_only=True)
class AbsentWeight:
    """Stands for a weight that is not loaded now, when model code reads its attributes from outside its module."""

    shape: torch.Size
    dtype: torch.dtype
    fetch: Callable[[], torch.Tensor]  # requests the weight from the engine
    device: None = None  # `x.to(weight.device)` then does not move x

    def __getitem__(self, index: int | tuple[int, slice]) -> torch.Tensor:
        """Returns a row of an embedding table, such as Gemma-4's padding token."""
        row = index[0] if isinstance(index, tuple) else index
        weight = self.fetch()
        return torch.nn.functional.embedding(torch.tensor(row, device=weight.device), weight)


class StreamedModule(torch.nn.Module):
    """Wraps a module: `forward` requests the stage's weights from the engine and runs the module with them."""

    def __init__(self, inner: torch.nn.Module, name: str, stage: int, *, is_last_layer: bool = False):
        super().__init__()
        self.inner = inner
        self.name = name
        self.stage = stage
        self.is_last_layer = is_last_layer
        self.parameter_names = tuple(inner.state_dict())  # without the module's path, which is `name`
        self.binding = Binding(inner, self.parameter_names, f"{name}.")
        self.projections = FusedProjections()
        self.forward_override: ForwardOverride | None = None  # replaces `forward` if another rank has this layer
        self.weights_override: Callable[[], Weights] | None = None  # returns weights if another rank has the real ones

    def __getattr__(  # pyright: ignore[reportIncompatibleMethodOverride] - may return an AbsentWeight
        self, name: str
    ) -> torch.Tensor | torch.nn.Module | AbsentWeight:
        """Model code reads attributes such as `layer_type` or `weight.dtype` off its modules."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("inner"), name)
            is_absent = isinstance(value, torch.nn.Parameter) and value.is_meta
            if not is_absent:
                return value
            return AbsentWeight(
                shape=value.shape, dtype=value.dtype, fetch=lambda: self._weights()[f"{self.name}.{name}"]
            )

    def _weights(self) -> Weights:
        return need_stage(self.stage) if self.weights_override is None else self.weights_override()

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.run_inner(args, kwargs) if self.forward_override is None else self.forward_override(args, kwargs)

    def run_inner(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Requests the stage's weights, sets the module's parameters to them, and runs the module."""
        weights = self._weights()
        inner = self._modules["inner"]  # faster than `__getattr__`
        assert inner is not None, "no module is wrapped"
        stored = self.binding.enter(weights)
        try:
            blocks: dict[str, Sequence[Block]] = {}  # row blocks of weights that may be multiplied together, by name
            for name, weight in stored.items():
                if weight.is_plain:
                    weight.projections, blocks[name] = (self.projections, name), weight.entries[0]
            with self.projections.scope(blocks) if stored else NO_FUSION:
                return forward_selected(inner, args, kwargs) if self.is_last_layer else inner(*args, **kwargs)
        finally:
            self.binding.leave()


class Binding:
    """Sets a module's parameters to the stage's weights while any lane is inside the module. A lane (micro-batch) may
    be suspended there while another one enters. Not thread-safe: all lanes share one thread.

    `torch.func.functional_call` cannot be used: it restores parameters in LIFO order, but lanes leave a layer in FIFO
    order. The first lane to leave would remove the weights that other lanes still use.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str], prefix: str = ""):
        """`names`: parameters and buffers of `module`. `prefix` + name is the key in a stage's weights."""
        # (key in a stage's weights, the owning module's dict of parameters or buffers, key in that dict).
        self._targets: list[tuple[str, _Tensors, str]] = []
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            tensors = owner._parameters if leaf in owner._parameters else owner._buffers
            self._targets.append((prefix + name, cast("_Tensors", tensors), leaf))
        self._num_inside = 0  # lanes
        self._absent: list[torch.Tensor | None] = []  # meta tensors of `_targets`, restored when the last lane leaves
        self._stored: dict[str, StoredWeight] = {}

    def enter(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, StoredWeight]:
        """Sets the weights, until `leave` was called as often as `enter`. Lanes that are inside together must pass the
        same weights; those of the first lane are used. Returns the weights that stay in their storage format."""
        self._num_inside += 1
        if self._num_inside > 1:
            return self._stored
        if not self._absent:
            self._absent = [tensors.get(leaf) for _, tensors, leaf in self._targets]
        for name, tensors, leaf in self._targets:
            if name in weights:
                weight = tensors[leaf] = weights[name]
                if weight.__class__ is not torch.Tensor and isinstance(weight, StoredWeight):
                    self._stored[name] = weight
        return self._stored

    def leave(self) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            for (_, tensors, leaf), absent in zip(self._targets, self._absent, strict=True):
                tensors[leaf] = absent  # no view stays: the engine may reuse the slot
            self._stored.clear()

    @contextmanager
    def bound(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Sets the weights for the duration of a `with` block."""
        self.enter(weights)
        try:
            yield
        finally:
            self.leave()


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model that requests its weights stage by stage."""

    model: PreTrainedModel
    kinds: tuple[StageKind, ...]  # of each stage
    stage_of: Mapping[str, int]  # full parameter name -> stage
    modules: tuple[StreamedModule, ...]


def stage_model(model: PreTrainedModel) -> StagedModel:
    """Wraps the layers and outer modules of `model`, which it mutates. All parameters must be on the meta device, and
    no buffers."""
    state = dict(model.state_dict(keep_vars=True))
    lists = layer_lists(model)
    kinds = stage_kinds(lists)
    wrapped: list[StreamedModule] = []
    for layer_list in lists:
        path, layers, first = layer_list.path, layer_list.layers, kinds.index(layer_list.kind)
        for index, layer in enumerate(layers):
            is_last = layer_list.kind is StageKind.layer and index == len(layers) - 1
            wrapped.append(StreamedModule(layer, f"{path}.{index}", first + index, is_last_layer=is_last))
            layers[index] = wrapped[-1]
    outer = _wrap_outer(model, [layer_list.path for layer_list in lists], len(kinds))
    _assign_outer_stages(model, outer, kinds)
    wrapped += outer
    stage_of = {f"{module.name}.{name}": module.stage for module in wrapped for name in module.parameter_names}
    parameters = {name for name, tensor in state.items() if isinstance(tensor, torch.nn.Parameter)}
    if missing := sorted(parameters - stage_of.keys()):
        raise ConfigError(f"model.path: {type(model).__name__}: parameter {missing[0]!r} is not in any streamed module")
    return StagedModel(model=model, kinds=kinds, stage_of=stage_of, modules=tuple(wrapped))


def _wrap_outer(model: PreTrainedModel, layer_paths: Sequence[str], first_number: int) -> list[StreamedModule]:
    """Wraps the outer modules: the topmost modules that own parameters and contain no layers. Gives each a provisional
    stage number, from `first_number` on. `layer_paths`: names of the module lists of layers."""
    outer: list[StreamedModule] = []

    def visit(module: torch.nn.Module, path: str) -> None:
        for name, child in list(module.named_children()):
            child_path = f"{path}.{name}" if path else name
            if child_path in layer_paths:
                continue
            is_owner = any(True for _ in child.parameters(recurse=False))
            if is_owner and not any(layers.startswith(f"{child_path}.") for layers in layer_paths):
                outer.append(StreamedModule(child, child_path, first_number + len(outer)))
                setattr(module, name, outer[-1])
            else:
                visit(child, child_path)

    visit(model, "")
    return outer


def _assign_outer_stages(model: PreTrainedModel, outer: list[StreamedModule], kinds: tuple[StageKind, ...]) -> None:
    """Assigns stages to outer modules. Dry runs of one token find modules that run before the first layer; these belong
    to the stage before that layer, and the others to the head."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    stages = dict.fromkeys(outer, kinds.index(StageKind.head))
    if StageKind.bridge in kinds:
        encoder = model.get_encoder()
        before = _modules_before_layers(lambda: encoder(input_ids=ids), outer)
        before += [module for module in outer if module is model.get_input_embeddings()]  # T5 never calls them itself
        # The bridge: outer modules in the encoder, and outer modules that the decoder runs before its layers.
        in_encoder = set(encoder.modules())
        encoder_outputs = (torch.zeros(1, 1, encoder_config(model.config).hidden_size, dtype=model.dtype),)
        inputs = {"encoder_outputs": encoder_outputs, "decoder_input_ids": ids, "use_cache": False}
        bridge = _modules_before_layers(lambda: model(**inputs), outer)
        bridge += [module for module in outer if module in in_encoder]
        stages |= dict.fromkeys(bridge, kinds.index(StageKind.bridge))
    else:
        inputs = accepted_arguments(model.forward, {"input_ids": ids, "position_ids": ids, "use_cache": False})
        before = _modules_before_layers(lambda: model(**inputs), outer)
    stages |= dict.fromkeys(before, EMBEDDING)
    for module, stage in stages.items():
        module.stage = stage


def accepted_arguments(forward: Callable[..., object], arguments: Mapping[str, object]) -> dict[str, object]:
    """Returns the arguments that `forward` accepts."""
    parameters = inspect.signature(forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def _modules_before_layers(forward: Callable[[], object], outer: list[StreamedModule]) -> list[StreamedModule]:
    """Finds the outer modules that run before the first layer. Answers their requests with zeros of stride 0, which
    take no memory, and stops `forward` at the first request of a layer. Needs provisional stage numbers."""
    by_number = {module.stage: module for module in outer}
    before: list[StreamedModule] = []
    run = greenlet(forward)
    with torch.inference_mode():
        event = run.switch()
        while isinstance(event, NeedStage) and event.stage in by_number:
            before.append(by_number[event.stage])
            event = run.switch(_empty_weight(before[-1]))
    if run.dead:
        raise ConfigError("model.path: the model's forward does not run its layers, so they cannot be streamed")
    run.throw(GreenletExit)
    return before


def empty_weights(staged: StagedModel, stage: int, device: torch.device) -> Weights:
    """Returns zeros of stride 0 as a stage's weights, for a rank that must run the stage but does not use its
    result."""
    weights: dict[str, torch.Tensor] = {}
    for module in staged.modules:
        if module.stage == stage:
            weights |= _empty_weight(module, device)
    return weights


def _empty_weight(module: StreamedModule, device: torch.device | None = None) -> dict[str, torch.Tensor]:
    state = module.inner.state_dict(keep_vars=True)
    return {
        f"{module.name}.{name}": torch.zeros(1, dtype=tensor.dtype, device=device).expand(tensor.shape)
        for name, tensor in state.items()
        if tensor.is_meta
    }


def forward_selected(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns `layer(*args, **kwargs)`, with zeros for tokens that are not selected. Runs the layer twice: with all
    tokens until it has stored keys and values, then with the selected tokens."""
    run = getcurrent()
    cache = run.cache if isinstance(run, LaneRun) else None
    if not isinstance(run, LaneRun) or not isinstance(cache, PagedKV) or run.keeps_hidden:
        return layer(*args, **kwargs)
    if not can_skip_unselected(cache.num_tokens, cache.num_selected):
        return layer(*args, **kwargs)
    indices: set[Any] = {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}
    if len(indices) != 1:  # two attentions, as in LongCat-Flash: all tokens continue after the first one
        return layer(*args, **kwargs)
    selected_B, num_tokens = cache.selected_B, cache.num_tokens
    try:
        selected_args, selected_kwargs = (_select_tokens(values, selected_B, num_tokens) for values in (args, kwargs))
    except _NotByTokenError:
        return layer(*args, **kwargs)
    try:
        with cache.stop_after_storing(indices.pop()):
            return layer(*args, **kwargs)  # LayerStored was not raised: the layer did not update the cache
    except LayerStored:
        pass
    with cache.restrict_to_selected():
        out = layer(*selected_args, **selected_kwargs)
    if isinstance(out, tuple):
        return (_scatter_tokens(out[0], selected_B, num_tokens), *out[1:])
    return _scatter_tokens(out, selected_B, num_tokens)


class _NotByTokenError(Exception):
    """Raised if a tensor has a dimension of size `num_tokens` that may not be its tokens."""


def _select_tokens(value: Any, selected_B: torch.Tensor, num_tokens: int) -> Any:
    """Selects tokens of a tensor (1, T, ...) or (T,), or of all such tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and value.shape[:2] == (1, num_tokens):
            return value[:, selected_B]
        if value.shape == (num_tokens,):
            return value[selected_B]
        if num_tokens in value.shape:
            raise _NotByTokenError
        return value
    if isinstance(value, dict):
        return {key: _select_tokens(item, selected_B, num_tokens) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_select_tokens(item, selected_B, num_tokens) for item in value)
    return value


def _scatter_tokens(out: torch.Tensor, selected_B: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Scatters (1, B, ...) into zeros (1, T, ...)."""
    whole = out.new_zeros(1, num_tokens, *out.shape[2:])
    whole[:, selected_B] = out
    return whole
