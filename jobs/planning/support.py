"""The tables of `jobs.models`: what the runtime supports for each tested model family, and storage formats of weights.

A row of the first table comes from a tiny model of the family on the meta device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from transformers import CONFIG_MAPPING

from runtime.config.settings import Lanes
from runtime.errors import ConfigError
from runtime.foreign import deepseek_moe
from runtime.formats.registry import FORMATS, METHODS
from runtime.model.capabilities import CacheKind, ExpertKind, cache_kind, choose_lanes, expert_kind, measure_cache
from runtime.model.families import FAMILIES, Family
from runtime.probing.meta import build_meta_model
from runtime.synthesize.checkpoints import make_config

from ..config.settings import TableFormat
from .published import read_losses


@dataclass(frozen=True, kw_only=True)
class FamilyCapabilities:
    """A row of the support table. `lanes`: how micro-batches are stored, packed or left-padded. `note`: the reason for
    padding. If the installed transformers lacks the family, `note` says so, and the other columns are None."""

    name: str
    model_type: str
    lanes: Lanes | None
    experts: ExpertKind | None
    cache: CacheKind | None
    note: str

    @staticmethod
    def from_family(family: Family) -> "FamilyCapabilities":
        """Inspects a tiny model of the family, in a few hundredths of a second."""
        deepseek_moe.register()
        if family.model_type not in CONFIG_MAPPING:
            note = f"not in transformers {transformers.__version__}"
            return FamilyCapabilities(
                name=family.name, model_type=family.model_type, lanes=None, experts=None, cache=None, note=note
            )
        model = build_meta_model(make_config(family.model_type, family.overrides), torch.float32)
        is_packed, reason = choose_lanes(model, Lanes.auto)
        return FamilyCapabilities(
            name=family.name,
            model_type=family.model_type,
            lanes=Lanes.packed if is_packed else Lanes.padded,
            experts=expert_kind(model),
            cache=cache_kind(model, is_latent=measure_cache(model).is_latent),
            note=reason,
        )

    @property
    def cells(self) -> tuple[str, ...]:
        if self.lanes is None or self.experts is None or self.cache is None:
            return self.name, self.model_type, self.note, "", "", "no"
        lanes = f"{self.lanes.value}: {self.note}" if self.note else self.lanes.value
        return self.name, self.model_type, lanes, self.experts.value, self.cache.value, _TESTED


_HEADINGS = ("family", "model_type", "lanes", "experts", "cache", "tested")
_FORMATS_HEADINGS = ("format", "bytes a number", "numbers", "companions", "loss of model=tiny")
_USUAL_COLUMNS = 4096  # in a row of a matrix
_TESTED = "greedy, sampled"
_FOOT = "Tested: equals transformers' generate, token for token, in every tier (tests/runtime/test_families.py)."


def find_families(part: str | None) -> list[Family]:
    """The families with `part` in their name or model type; None: all. Raises ConfigError if there is none."""
    matches = [family for family in FAMILIES.values() if part is None or part in f"{family.name} {family.model_type}"]
    if not matches:
        types = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES.values()))
        raise ConfigError(f"family={part} matches no name or model_type of a family; model types: {types}")
    return matches


def support_table(rows: Sequence[FamilyCapabilities], shape: TableFormat) -> str:
    return _table([_HEADINGS, *(row.cells for row in rows)], shape, _FOOT)


def format_table(shape: TableFormat) -> str:
    """Formats the table of storage formats: bytes per number in rows of 4,096 numbers, and measured errors."""
    losses = {
        row["format"]: f"weights off by {row['weight_error']:.2%}, perplexity x {row['perplexity_ratio']:.4f}, "
        f"{row['right']:.1%} of answers right"
        for row in read_losses()
    }
    cells = [
        (
            name,
            f"{spec.row_bytes(_USUAL_COLUMNS) / _USUAL_COLUMNS:.2f}",
            spec.loss.value,
            ", ".join(spec.companions),
            losses.get(name, ""),
        )
        for name, spec in FORMATS.items()
    ]
    methods = ", ".join(sorted(METHODS))
    return _table([_FORMATS_HEADINGS, *cells], shape, f"quant_method of config.json: {methods}; and GGUF files.")


def _table(cells: list[tuple[str, ...]], shape: TableFormat, foot: str) -> str:
    """Formats rows as a table; the first row is its head."""
    if shape is TableFormat.markdown:
        cells.insert(1, ("---",) * len(cells[0]))
        lines = [f"| {' | '.join(line)} |" for line in cells]
    else:
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
    return "\n".join([*lines, "", foot])
