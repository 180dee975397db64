"""The numbers in the comment of each named model are those of its architecture, counted on a model without weights."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from transformers import PreTrainedModel

from jobs.planning.shapes import read_shape
from runtime.config.settings import DType
from runtime.probing.meta import build_meta_model, untie_head
from runtime.synthesize.checkpoints import make_config
from runtime.units import GIB, MIB

CONF = Path(__file__).resolve().parents[2] / "conf"
PUBLISHED = sorted(p.stem for p in (CONF / "model").glob("*.yaml") if p.stem not in ("hf", "tiny", "random"))
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_top_k")


def architecture(name: str) -> dict[str, object]:
    return yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8"))["architecture"]


def value_of(keys: tuple[str, ...], values: Mapping[str, object]) -> int:
    nested = [value for value in values.values() if isinstance(value, dict)]
    return next(int(group[key]) for group in (values, *nested) for key in keys if key in group)


def active_parameters(model: PreTrainedModel, values: Mapping[str, object]) -> float:
    """What a token uses: its share of the routed experts, and everything else (embeddings and head included), but for
    tables of n-grams inside layers, of which it takes a few rows."""
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    tables = {f"{name}.weight" for name in modules if ".layers." in name}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name not in tables}
    routed = sum(size for name, size in sizes.items() if "experts" in name.split("."))
    if not routed:
        return sum(sizes.values())
    return sum(sizes.values()) - routed * (1 - value_of(EXPERTS_PER_TOKEN, values) / value_of(NUM_EXPERTS, values))


def three_digits(number: float) -> str:
    return f"{number:#.3g}".rstrip(".") if number < 999.5 else f"{number:.0f}"


def count_text(count: float) -> str:
    return f"{three_digits(count / 1e9)} B" if count >= 0.9995e9 else f"{three_digits(count / 1e6)} M"


def bytes_text(num_bytes: float) -> str:
    return f"{three_digits(num_bytes / GIB)} GiB" if num_bytes >= GIB else f"{three_digits(num_bytes / MIB)} MiB"


def size_text(name: str) -> str:
    values = architecture(name)
    of_weights = ("model_type", "quantization_config")
    config = make_config(str(values["model_type"]), {k: v for k, v in values.items() if k not in of_weights})
    model = build_meta_model(config, torch.bfloat16)
    if not values.get("tie_word_embeddings", True):
        untie_head(model)
    parameters = list(model.parameters())  # tied ones once, as a checkpoint holds them
    total, active = sum(p.numel() for p in parameters), active_parameters(model, values)
    share = "all active" if active == total else f"{count_text(active)} active per token"
    return f"{count_text(total)} parameters, {share}, {bytes_text(sum(p.nbytes for p in parameters))} in bfloat16"


@pytest.mark.dealt(most=6)
@pytest.mark.parametrize("name", PUBLISHED)
def test_comment_tells_the_size_of_the_architecture(name: str) -> None:
    comment = (CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(r": (.+? in bfloat16)", comment)
    assert found is not None
    assert found[1] == size_text(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_comment_tells_the_bytes_that_a_model_is_published_in_where_these_are_fewer(name: str) -> None:
    comment = (CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(r"(\S+ GiB) as published", comment)
    is_fewer = "quantization_config" in architecture(name)
    assert (found[1] if found else None) == (
        bytes_text(read_shape(name, DType.bfloat16).weight_bytes) if is_fewer else None
    )
