"""Splits a model into stages without touching its code: wraps each layer, and each outer module with weights, in a
`StreamedModule`. Dry runs find the outer modules that run before the layers.

In the last decoder layer all tokens store K and V, but only tokens that the head needs continue: decoded ones, and the
last of a finished prompt. With L layers this saves almost 1/L of a prefill. It is valid for any class, since packed
lanes treat tokens independently outside of attention.
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

EMBEDDING = 0
NOTHING_GATHERED = nullcontext()
ForwardOverride: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], object]
_Tensors: TypeAlias = dict[str, torch.Tensor | None]  # of a module, by name


@dataclass(frozen=True, kw_only=True)
class AbsentWeight:
    """The attributes of a weight that is not loaded, for code outside its module. It has no device: `x.to(None)` leaves
    x unmoved. `fetch` requests the weight from the engine."""

    shape: torch.Size
    dtype: torch.dtype
    fetch: Callable[[], torch.Tensor]
    device: None = None

    def __getitem__(self, index: int | tuple[int, slice]) -> torch.Tensor:
        """A row of an embedding table, such as Gemma-4's padding token."""
        row = index[0] if isinstance(index, tuple) else index
        weight = self.fetch()
        return torch.nn.functional.embedding(torch.tensor(row, device=weight.device), weight)


class StreamedModule(torch.nn.Module):
    """Wraps a module: requests its stage's weights from the engine and runs the original with them."""

    def __init__(self, inner: torch.nn.Module, name: str, stage: int, *, is_last_layer: bool = False):
        super().__init__()
        self.inner = inner
        self.name = name
        self.stage = stage
        self.is_last_layer = is_last_layer
        self.parameter_names = tuple(inner.state_dict())  # in `inner`; in the stage's weights they are behind `name`
        self.binding = Binding(inner, self.parameter_names, f"{name}.")
        self.projections = FusedProjections()
        self.instead: ForwardOverride | None = None  # of a forward where other ranks have layers, see part.py
        self.stand_in: Callable[[], Weights] | None = None  # for weights that another rank has

    def __getattr__(  # pyright: ignore[reportIncompatibleMethodOverride] - the weights are elsewhere
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
        return need_stage(self.stage) if self.stand_in is None else self.stand_in()

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.run_inner(args, kwargs) if self.instead is None else self.instead(args, kwargs)

    def run_inner(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Runs the module with its weights bound."""
        weights = self._weights()
        inner = self._modules["inner"]  # which `__getattr__` would look for among all others
        assert inner is not None, "it stands in no module's place"
        stored = self.binding.enter(weights)
        try:
            blocks: dict[str, Sequence[Block]] = {}  # of those that may be multiplied together
            for name, weight in stored.items():
                if weight.is_plain:
                    weight.projections, blocks[name] = (self.projections, name), weight.entries[0]
            with self.projections.scope(blocks) if stored else NOTHING_GATHERED:
                return forward_selected(inner, args, kwargs) if self.is_last_layer else inner(*args, **kwargs)
        finally:
            self.binding.leave()


class Binding:
    """Binds a stage's weights to a module's parameters while any lane is inside the module. `names` are parameters and
    buffers of `module`; their weights are keyed by `prefix` + name. Not thread-safe: all lanes share one thread.

    `torch.func.functional_call` would not work: it restores parameters in LIFO order, but lanes leave a layer in FIFO
    order, so the first to leave would unbind the weights of the others.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str], prefix: str = ""):
        self._places: list[tuple[str, _Tensors, str]] = []  # names of weights, where their tensors are, and names there
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            tensors = owner._parameters if leaf in owner._parameters else owner._buffers
            self._places.append((prefix + name, cast("_Tensors", tensors), leaf))  # plain ones stand in for parameters
        self._num_inside = 0
        self._absent: list[torch.Tensor | None] = []  # what stands in these places while nobody is inside
        self._stored: dict[str, StoredWeight] = {}

    def enter(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, StoredWeight]:
        """Binds the weights until as many lanes have left. Lanes inside at the same time must bring the same weights;
        the first one's are used. Returns the weights that stay in their storage format."""
        self._num_inside += 1
        if self._num_inside > 1:
            return self._stored
        if not self._absent:
            self._absent = [tensors.get(leaf) for _, tensors, leaf in self._places]
        for name, tensors, leaf in self._places:
            if name in weights:
                weight = tensors[leaf] = weights[name]
                if weight.__class__ is not torch.Tensor and isinstance(weight, StoredWeight):
                    self._stored[name] = weight
        return self._stored

    def leave(self) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            for (_, tensors, leaf), absent in zip(self._places, self._absent, strict=True):
                tensors[leaf] = absent
            self._stored.clear()

    @contextmanager
    def bound(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Binds the weights for the duration of a `with` block."""
        self.enter(weights)
        try:
            yield
        finally:
            self.leave()


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model that requests its weights by stage. `stage_of` maps full parameter names to stages; `kinds` has the kind
    of each stage."""

    model: PreTrainedModel
    kinds: tuple[StageKind, ...]
    stage_of: Mapping[str, int]
    modules: tuple[StreamedModule, ...]


def stage_model(model: PreTrainedModel) -> StagedModel:
    """Wraps the layers and outer modules of `model`. Mutates it. Parameters must be on the meta device, buffers
    real."""
    state = dict(model.state_dict(keep_vars=True))
    lists = layer_lists(model)
    kinds = stage_kinds(lists)
    wrapped: list[StreamedModule] = []
    for found in lists:
        first = kinds.index(found.kind)
        for index, layer in enumerate(found.layers):
            is_last = found.kind is StageKind.layer and index == len(found.layers) - 1
            wrapped.append(StreamedModule(layer, f"{found.path}.{index}", first + index, is_last_layer=is_last))
            found.layers[index] = wrapped[-1]
    outer = _wrap_outer(model, [found.path for found in lists], len(kinds))
    _assign_outer_stages(model, outer, kinds)
    wrapped += outer
    stage_of = {f"{module.name}.{name}": module.stage for module in wrapped for name in module.parameter_names}
    lost = sorted(
        name for name, tensor in state.items() if name not in stage_of and isinstance(tensor, torch.nn.Parameter)
    )
    if lost:
        raise ConfigError(f"model.path: {type(model).__name__} keeps {lost[0]!r} where no stage can provide it")
    return StagedModel(model=model, kinds=kinds, stage_of=stage_of, modules=tuple(wrapped))


def _wrap_outer(model: PreTrainedModel, layer_paths: Sequence[str], first_number: int) -> list[StreamedModule]:
    """Wraps the topmost modules outside the layers that own parameters; each gets a provisional stage number."""
    found: list[StreamedModule] = []

    def visit(module: torch.nn.Module, path: str) -> None:
        for name, child in list(module.named_children()):
            child_path = f"{path}.{name}" if path else name
            if child_path in layer_paths:
                continue
            is_owner = any(True for _ in child.parameters(recurse=False))
            if is_owner and not any(layers.startswith(f"{child_path}.") for layers in layer_paths):
                found.append(StreamedModule(child, child_path, first_number + len(found)))
                setattr(module, name, found[-1])
            else:
                visit(child, child_path)

    visit(model, "")
    return found


def _assign_outer_stages(model: PreTrainedModel, outer: list[StreamedModule], kinds: tuple[StageKind, ...]) -> None:
    """Assigns stages to outer modules by dry runs of one token: modules that run before the first layer belong to the
    stage before it."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    stages = dict.fromkeys(outer, kinds.index(StageKind.head))
    if StageKind.bridge in kinds:
        encoder = model.get_encoder()
        before = _modules_before_layers(lambda: encoder(input_ids=ids), outer)
        before += [module for module in outer if module is model.get_input_embeddings()]  # T5 never calls them itself
        # The bridge has what the encoder owns outside its layers, and what the decoder asks for before its own.
        inside = set(encoder.modules())
        encoded = (torch.zeros(1, 1, encoder_config(model.config).hidden_size, dtype=model.dtype),)
        known = {"encoder_outputs": encoded, "decoder_input_ids": ids, "use_cache": False}
        bridge = [*_modules_before_layers(lambda: model(**known), outer), *(each for each in outer if each in inside)]
        stages |= dict.fromkeys(bridge, kinds.index(StageKind.bridge))
    else:
        known = accepted_arguments(model.forward, {"input_ids": ids, "position_ids": ids, "use_cache": False})
        before = _modules_before_layers(lambda: model(**known), outer)
    stages |= dict.fromkeys(before, EMBEDDING)
    for module, stage in stages.items():
        module.stage = stage


def accepted_arguments(forward: Callable[..., object], arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments that `forward` accepts."""
    parameters = inspect.signature(forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def _modules_before_layers(forward: Callable[[], object], outer: list[StreamedModule]) -> list[StreamedModule]:
    """The outer modules that run before the first layer. Weights are stride-0 zeros, so nothing is allocated."""
    by_number = {module.stage: module for module in outer}
    before: list[StreamedModule] = []
    run = greenlet(forward)
    with torch.inference_mode():
        event = run.switch()
        while isinstance(event, NeedStage) and event.stage in by_number:
            before.append(by_number[event.stage])
            event = run.switch(_empty_weight(before[-1]))
    if run.dead:
        raise ConfigError("model.path: text passes by the layers of this model, so they cannot be streamed one by one")
    run.throw(GreenletExit)
    return before


def empty_weights(staged: StagedModel, stage: int, device: torch.device) -> Weights:
    """Stride-0 zeros for a stage's weights, for a run that only has to pass through it."""
    found: dict[str, torch.Tensor] = {}
    for module in staged.modules:
        if module.stage == stage:
            found |= _empty_weight(module, device)
    return found


def _empty_weight(module: StreamedModule, device: torch.device | None = None) -> dict[str, torch.Tensor]:
    state = module.inner.state_dict(keep_vars=True)
    return {
        f"{module.name}.{name}": torch.zeros(1, dtype=tensor.dtype, device=device).expand(tensor.shape)
        for name, tensor in state.items()
        if tensor.is_meta
    }


def forward_selected(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of `layer(*args, **kwargs)`, with zeros for tokens that are not selected."""
    run = getcurrent()
    cache = run.cache if isinstance(run, LaneRun) else None
    if not isinstance(cache, PagedKV) or not can_skip_unselected(cache.num_tokens, cache.num_selected):
        return layer(*args, **kwargs)
    indices: set[Any] = {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}
    if len(indices) != 1:  # where it attends twice, as LongCat-Flash does, all tokens go on from the first attention
        return layer(*args, **kwargs)
    selected_B, num_tokens = cache.selected_B, cache.num_tokens
    try:
        few, few_named = (_select_tokens(arguments, selected_B, num_tokens) for arguments in (args, kwargs))
    except _NotByTokenError:
        return layer(*args, **kwargs)
    try:
        with cache.stop_after_storing(indices.pop()):
            return layer(*args, **kwargs)  # it stores nothing, or not here, and has gone on
    except LayerStored:
        pass
    with cache.restrict_to_selected():
        out = layer(*few, **few_named)
    if isinstance(out, tuple):
        return (_scatter_tokens(out[0], selected_B, num_tokens), *out[1:])
    return _scatter_tokens(out, selected_B, num_tokens)


class _NotByTokenError(Exception):
    """A tensor has a dimension of `num_tokens` that is not a token dimension."""


def _select_tokens(value: Any, selected_B: torch.Tensor, num_tokens: int) -> Any:
    """Selects tokens of tensors (1, T, ...) or (T), also in nested containers."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and value.shape[:2] == (1, num_tokens):
            return value[:, selected_B]
        if value.shape == (num_tokens,):
            return value[selected_B]
        if num_tokens in value.shape:
            raise _NotByTokenError
        return value
    if isinstance(value, dict):
        return {key: _select_tokens(each, selected_B, num_tokens) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_select_tokens(each, selected_B, num_tokens) for each in value)
    return value


def _scatter_tokens(out: torch.Tensor, selected_B: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Scatters (1, B, ...) into zeros (1, T, ...)."""
    whole = out.new_zeros(1, num_tokens, *out.shape[2:])
    whole[:, selected_B] = out
    return whole
