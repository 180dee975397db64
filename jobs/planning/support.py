"""What the runtime does with each proven family, read off the code: from a tiny model of it without weights."""

from dataclasses import dataclass

import torch
import transformers
from transformers import CONFIG_MAPPING

from runtime.config import Lanes
from runtime.foreign import deepseek_moe
from runtime.model.families import Family
from runtime.model.traits import CacheKind, ExpertKind, cache_kind, choose_lanes, expert_kind, measure_cache
from runtime.probing.meta import build_meta_model
from runtime.synthesize.checkpoints import config_for


@dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """A row of the support table. Where the installed transformers lacks the family, `note` says so and the rest is
    None; else `note` says why lanes are padded, and is empty where they are packed."""

    name: str
    model_type: str
    lanes: Lanes | None
    experts: ExpertKind | None
    cache: CacheKind | None
    note: str


def describe(family: Family) -> FamilyTraits:
    """Takes a few hundredths of a second and no memory to speak of."""
    deepseek_moe.register()
    if family.model_type not in CONFIG_MAPPING:
        return FamilyTraits(
            name=family.name,
            model_type=family.model_type,
            lanes=None,
            experts=None,
            cache=None,
            note=f"not in transformers {transformers.__version__}",
        )
    model = build_meta_model(config_for(family.model_type, family.overrides), torch.float32)
    is_packed, reason = choose_lanes(model, Lanes.auto)
    return FamilyTraits(
        name=family.name,
        model_type=family.model_type,
        lanes=Lanes.packed if is_packed else Lanes.padded,
        experts=expert_kind(model),
        cache=cache_kind(model, is_latent=measure_cache(model).is_latent),
        note=reason,
    )
