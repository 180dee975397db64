"""Cuts a model into stages without touching its code: finds its layers, puts a `StreamedModule` in the place of each
module that owns weights, and learns by dry runs which of the others come before the layers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from greenlet import GreenletExit, greenlet
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..events import NeedStage, Weights, need_stage
from ..linear.fused_projections import FusedProjections
from ..linear.panels import Block
from ..linear.stored import StoredWeight
from ..plan.shape.shapes import StageKind
from ..probing.decoder_config import encoder_config
from ..probing.layer_lists import layer_lists, stage_kinds
from .binding import Binding
from .last_layer import forward_selected
from .traits import accepted

EMBEDDING = 0
NOTHING_GATHERED = nullcontext()
Instead: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], object]


@dataclass(frozen=True, kw_only=True)
class AbsentWeight:
    """All that code outside a streamed module may ask about one of its weights. The weight comes to where it is
    needed, so it has no device: `x.to(None)` leaves x where it is. `fetch` asks the engine for it."""

    shape: torch.Size
    dtype: torch.dtype
    fetch: Callable[[], torch.Tensor]
    device: None = None

    def __getitem__(self, index: int | tuple[int, slice]) -> torch.Tensor:
        """A row of a table, as Gemma-4 looks up that of its padding token."""
        row = index[0] if isinstance(index, tuple) else index
        weight = self.fetch()
        return torch.nn.functional.embedding(torch.tensor(row, device=weight.device), weight)


class StreamedModule(torch.nn.Module):
    """Stands in a module's place; asks the engine for its stage's weights and runs the original with them in their
    places."""

    def __init__(
        self, inner: torch.nn.Module, name: str, stage: int, parameter_names: tuple[str, ...], *, is_last_layer: bool
    ):
        super().__init__()
        self.inner = inner
        self.name = name
        self.stage = stage
        self.is_last_layer = is_last_layer
        self.parameter_names = parameter_names  # (in the stage's weights, in `inner`) share the suffix after the name
        self.binding = Binding(inner, parameter_names, f"{name}.")
        self.projections = FusedProjections()
        self.instead: Instead | None = None  # of a forward where other ranks have layers, see part.py
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
        return self.computed(args, kwargs) if self.instead is None else self.instead(args, kwargs)

    def computed(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """What the module comes to with its weights."""
        weights = self._weights()
        inner = self._modules["inner"]  # which `__getattr__` would look for among all others
        assert inner is not None, "it stands in no module's place"
        stored = self.binding.enter(weights)
        try:
            with self.projections.gathered(self._blocks_of(stored)) if stored else NOTHING_GATHERED:
                return forward_selected(inner, args, kwargs) if self.is_last_layer else inner(*args, **kwargs)
        finally:
            self.binding.leave()

    def _blocks_of(self, weights: Mapping[str, StoredWeight]) -> dict[str, Sequence[Block]]:
        """Returns the blocks of those that may be multiplied together."""
        blocks: dict[str, Sequence[Block]] = {}
        for name, weight in weights.items():
            if weight.is_plain:
                weight.projections, blocks[name] = (self.projections, name), weight.entries[0]
        return blocks


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model whose weights are asked for. `stage_of` maps full parameter names to stages; `kinds` is what each is."""

    model: PreTrainedModel
    kinds: tuple[StageKind, ...]
    stage_of: Mapping[str, int]
    modules: tuple[StreamedModule, ...]


def stage_model(model: PreTrainedModel) -> StagedModel:
    """Mutates `model`: its layers and outer modules are wrapped. Parameters must be on the meta device, buffers
    real."""
    state = dict(model.state_dict(keep_vars=True))
    lists = layer_lists(model)
    kinds = stage_kinds(lists)
    wrapped: list[StreamedModule] = []
    for found in lists:
        first = kinds.index(found.kind)
        for index, layer in enumerate(found.layers):
            is_last = found.kind is StageKind.layer and index == len(found.layers) - 1
            wrapped.append(_wrap(layer, f"{found.path}.{index}", first + index, is_last_layer=is_last))
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


def _wrap(module: torch.nn.Module, name: str, stage: int, *, is_last_layer: bool = False) -> StreamedModule:
    return StreamedModule(module, name, stage, tuple(module.state_dict().keys()), is_last_layer=is_last_layer)


def _wrap_outer(model: PreTrainedModel, layer_paths: Sequence[str], first_number: int) -> list[StreamedModule]:
    """The topmost modules outside the layers that own parameters themselves, each under a number of its own."""
    found: list[StreamedModule] = []

    def visit(module: torch.nn.Module, path: str) -> None:
        for name, child in list(module.named_children()):
            child_path = f"{path}.{name}" if path else name
            if child_path in layer_paths:
                continue
            is_owner = any(True for _ in child.parameters(recurse=False))
            if is_owner and not any(layers.startswith(f"{child_path}.") for layers in layer_paths):
                found.append(_wrap(child, child_path, first_number + len(found)))
                setattr(module, name, found[-1])
            else:
                visit(child, child_path)

    visit(model, "")
    return found


def _assign_outer_stages(model: PreTrainedModel, outer: list[StreamedModule], kinds: tuple[StageKind, ...]) -> None:
    """Decides by dry runs of one token: what is asked for on the way to the first layer belongs to the stage in front
    of it."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    stages = dict.fromkeys(outer, kinds.index(StageKind.head))
    if StageKind.bridge in kinds:
        encoder = model.get_encoder()
        before = _asked_before_layers(lambda: encoder(input_ids=ids), outer)
        before += [module for module in outer if module is model.get_input_embeddings()]  # T5 never calls them itself
        stages |= dict.fromkeys(_bridge(model, encoder, ids, outer), kinds.index(StageKind.bridge))
    else:
        known = accepted(model.forward, {"input_ids": ids, "position_ids": ids, "use_cache": False})
        before = _asked_before_layers(lambda: model(**known), outer)
    stages |= dict.fromkeys(before, EMBEDDING)
    for module, stage in stages.items():
        module.stage = stage


def _bridge(
    model: PreTrainedModel, encoder: torch.nn.Module, ids: torch.Tensor, outer: list[StreamedModule]
) -> list[StreamedModule]:
    """What the encoder owns outside its layers, and what the decoder asks for before its own."""
    inside = set(encoder.modules())
    encoded = (torch.zeros(1, 1, encoder_config(model.config).hidden_size, dtype=model.dtype),)
    asked = _asked_before_layers(lambda: model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False), outer)
    return [*asked, *(module for module in outer if module in inside)]


def _asked_before_layers(forward: Callable[[], object], outer: list[StreamedModule]) -> list[StreamedModule]:
    """The weights that modules get are zeros of full shape and no size (stride 0), so nothing is allocated."""
    by_number = {module.stage: module for module in outer}
    before: list[StreamedModule] = []
    run = greenlet(forward)
    with torch.inference_mode():
        event = run.switch()
        while isinstance(event, NeedStage) and event.stage in by_number:
            before.append(by_number[event.stage])
            event = run.switch(_hollow(before[-1]))
    if run.dead:
        raise ConfigError("model.path: text passes by the layers of this model, so they cannot be streamed one by one")
    run.throw(GreenletExit)
    return before


def hollow_weights(staged: StagedModel, stage: int, device: torch.device) -> Weights:
    """Makes for a stage zeros of full shape and no size, for a run that only wants to get past it."""
    found: dict[str, torch.Tensor] = {}
    for module in staged.modules:
        if module.stage == stage:
            found |= _hollow(module, device)
    return found


def _hollow(module: StreamedModule, device: torch.device | None = None) -> dict[str, torch.Tensor]:
    state = module.inner.state_dict(keep_vars=True)
    return {
        f"{module.name}.{name}": torch.zeros(1, dtype=tensor.dtype, device=device).expand(tensor.shape)
        for name, tensor in state.items()
        if tensor.is_meta
    }
