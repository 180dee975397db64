"""Cuts a model into stages without touching its code: finds the decoder layers, puts a `StreamedModule` in the place
of each module that owns weights, and learns by one dry run which of the others come before the first layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from greenlet import GreenletExit, greenlet
from transformers import PreTrainedModel

from ..errors import ConfigError
from .events import NeedStage, Weights, need_stage

EMBEDDING = 0


class StreamedModule(torch.nn.Module):
    """Stands in a module's place; asks the engine for its stage's weights and runs the original with them as
    arguments."""

    def __init__(self, inner: torch.nn.Module, name: str, stage: int, parameter_names: tuple[str, ...]):
        super().__init__()
        self.inner = inner
        self.name = name
        self.stage = stage
        self.parameter_names = parameter_names  # (in the stage's weights, in `inner`) share the suffix after the name

    def __getattr__(self, name: str) -> torch.Tensor | torch.nn.Module:
        """Model code reads attributes such as `layer_type` off its modules."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: object, **kwargs: object) -> object:
        weights = need_stage(self.stage)
        mine = {
            name: weights[f"{self.name}.{name}"] for name in self.parameter_names if f"{self.name}.{name}" in weights
        }
        return torch.func.functional_call(self.inner, mine, args, kwargs)


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model whose weights are asked for. `stage_of` maps full parameter names to stages 0..num_layers + 1."""

    model: PreTrainedModel
    num_layers: int
    stage_of: Mapping[str, int]
    modules: tuple[StreamedModule, ...]

    @property
    def head(self) -> int:
        return self.num_layers + 1


def decoder_layers(model: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """The first ModuleList of a class that transformers itself refuses to split over devices."""
    names = set(model._no_split_modules or ())
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) and type(module[0]).__name__ in names:
            return path, module
    raise ConfigError(
        f"model.path: {type(model).__name__} shows no list of decoder layers (_no_split_modules={sorted(names)}), "
        "so it cannot be streamed layer by layer"
    )


def stage_model(model: PreTrainedModel) -> StagedModel:
    """Mutates `model`: its layers and outer modules are wrapped. Parameters must be on the meta device, buffers
    real."""
    state = dict(model.state_dict(keep_vars=True))
    path, layers = decoder_layers(model)
    wrapped: list[StreamedModule] = []
    for index, layer in enumerate(layers):
        wrapped.append(_wrap(layer, f"{path}.{index}", index + 1))
        layers[index] = wrapped[-1]
    head = len(layers) + 1
    outer = _wrap_outer(model, path, head)
    _assign_outer_stages(model, outer, head)
    wrapped += outer
    stage_of = {f"{module.name}.{name}": module.stage for module in wrapped for name in module.parameter_names}
    lost = sorted(
        name for name, tensor in state.items() if name not in stage_of and isinstance(tensor, torch.nn.Parameter)
    )
    if lost:
        raise ConfigError(f"model.path: {type(model).__name__} keeps {lost[0]!r} where no stage can provide it")
    return StagedModel(model=model, num_layers=len(layers), stage_of=stage_of, modules=tuple(wrapped))


def _wrap(module: torch.nn.Module, name: str, stage: int) -> StreamedModule:
    return StreamedModule(module, name, stage, tuple(module.state_dict().keys()))


def _wrap_outer(model: PreTrainedModel, layers_path: str, stage: int) -> list[StreamedModule]:
    """The topmost modules outside the layers that own parameters themselves."""
    found: list[StreamedModule] = []

    def visit(module: torch.nn.Module, path: str) -> None:
        for name, child in list(module.named_children()):
            child_path = f"{path}.{name}" if path else name
            if child_path == layers_path:
                continue
            is_owner = any(True for _ in child.parameters(recurse=False))
            if is_owner and not layers_path.startswith(f"{child_path}."):
                found.append(_wrap(child, child_path, stage))
                setattr(module, name, found[-1])
            else:
                visit(child, child_path)

    visit(model, "")
    return found


def _assign_outer_stages(model: PreTrainedModel, outer: list[StreamedModule], head: int) -> None:
    """A dry run of one token up to the first layer: what is asked for on the way belongs to the embedding stage.

    The weights it gets are zeros of full shape and no size (stride 0), so nothing is allocated.
    """
    by_turn = {head + 1 + turn: module for turn, module in enumerate(outer)}
    for turn, module in by_turn.items():
        module.stage = turn
    before: list[StreamedModule] = []
    ids = torch.zeros(1, 1, dtype=torch.long)
    run = greenlet(lambda: model(input_ids=ids, position_ids=ids, use_cache=False))
    with torch.inference_mode():
        event = run.switch()
        while isinstance(event, NeedStage) and event.stage in by_turn:
            module = by_turn[event.stage]
            before.append(module)
            event = run.switch(_hollow(module))
    run.throw(GreenletExit)
    for module in outer:
        module.stage = EMBEDDING if module in before else head


def _hollow(module: StreamedModule) -> Weights:
    state = module.inner.state_dict(keep_vars=True)
    return {
        f"{module.name}.{name}": torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
        for name, tensor in state.items()
        if tensor.is_meta
    }
