"""Finds a model's layers without knowing its class: the lists of modules that transformers itself refuses to split."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..plan.shapes import StageKind


@dataclass(frozen=True, kw_only=True)
class LayerList:
    """`path` is that of `layers` in the model; `kind` what each of them is as a stage."""

    kind: StageKind
    path: str
    layers: torch.nn.ModuleList


def layer_lists(model: PreTrainedModel) -> list[LayerList]:
    """The decoder's, behind the encoder's where there is one. Raises ConfigError when none is found."""
    if not model.config.is_encoder_decoder:
        return [_find(model, model, StageKind.layer)]
    parts = ((model.get_encoder(), StageKind.encoder), (model.get_decoder(), StageKind.layer))
    return [_find(model, part, kind) for part, kind in parts]


def stage_kinds(lists: Sequence[LayerList]) -> tuple[StageKind, ...]:
    """The kind of each stage, in the order of the forward pass."""
    kinds = [StageKind.embedding]
    for found in lists:
        if found.kind is StageKind.layer and StageKind.encoder in kinds:
            kinds.append(StageKind.bridge)
        kinds += [found.kind] * len(found.layers)
    return (*kinds, StageKind.head)


def _find(model: PreTrainedModel, part: torch.nn.Module, kind: StageKind) -> LayerList:
    names = set(model._no_split_modules or ())
    inside = set(part.modules())
    for path, module in model.named_modules():
        if module not in inside or not isinstance(module, torch.nn.ModuleList) or not len(module):
            continue
        if type(module[0]).__name__ in names:
            return LayerList(kind=kind, path=path, layers=module)
    raise ConfigError(
        f"model.path: {type(model).__name__} shows no list of {kind.value}s (_no_split_modules={sorted(names)}), "
        "so it cannot be streamed layer by layer"
    )
