"""Computes the shapes of published architectures without a checkpoint, by building the model on the meta device.

A shape is the tensors of a model and their sizes. `jobs.models` writes the shapes of the models in conf/model to
jobs/data/shapes.jsonl.
"""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from runtime.config.settings import DType, Lanes
from runtime.model import experts
from runtime.model.capabilities import choose_lanes, make_shape, measure_cache
from runtime.model.stages import stage_model
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Parameter, TensorSlice
from runtime.probing.meta import build_meta_model, untie_head
from runtime.probing.tables import find_tables
from runtime.store.writer import DTYPE_NAMES, TensorSpec
from runtime.synthesize.checkpoints import make_config
from runtime.synthesize.random_weights import RandomWeights
from runtime.weights.conversions import target_specs
from runtime.weights.layout import map_weights

from ..config.settings import read_yaml
from ..config.typed import to_plain
from ..files.publishing import json_digest, publish, write_all
from .packed_shapes import Publication, published_shape
from .shapes import ShapeRow, to_row

STORED_DTYPE = DType.bfloat16  # nearly all published models have it
QUANTIZATION_KEY = "quantization_config"  # key in the architecture of a model that is published quantized


def build_shapes(name: str, architecture: Mapping[str, object]) -> dict[DType, ModelShape]:
    """The shapes of a model by compute dtype. They equal those of `load_model` for a checkpoint in `STORED_DTYPE`,
    except that they do not depend on the CPU kernels of this host. `architecture`: keys of transformers' config, with
    `model_type`; a quantization in it is ignored.

    Takes seconds and little memory. Raises ConfigError for an impossible architecture.
    """
    model = _build(architecture, STORED_DTYPE)
    specs = RandomWeights(model, seed=0).specs
    is_packed, _ = choose_lanes(model, Lanes.auto)
    cache = measure_cache(model)
    parameters, conversions = map_weights(model, _lay_out_tensors(specs))
    # Converted tensors are stored once, in a separate file.
    converted = _lay_out_tensors(target_specs(model, conversions), file="converted")
    parameters |= {name: Parameter(name=name, shape=t.shape, pieces=((t,),)) for name, t in converted.items()}
    parameters |= {stack: replace(parameters[stack], is_experts=True) for stack in experts.stack_names(model)}
    for table, rows_per_token in find_tables(model).items():
        parameters[table] = replace(parameters[table], rows_per_token=rows_per_token)
    shape = make_shape(name, stage_model(model), parameters, cache, is_packed=is_packed)
    cache = measure_cache(_build(architecture, DType.float32))
    wide = replace(
        shape,
        compute_dtype_bytes=4,
        kv_layer_bytes=cache.layer_bytes_per_token,
        state_bytes_per_sequence=cache.bytes_per_sequence,
        cross_kv_bytes_per_token=cache.cross_bytes_per_token,
    )
    return {STORED_DTYPE: shape, DType.float32: wide}


def _build(architecture: Mapping[str, object], dtype: DType) -> PreTrainedModel:
    keys = copy.deepcopy({**architecture})  # some config classes mutate their arguments
    model_type = str(keys.pop("model_type"))
    keys.pop(QUANTIZATION_KEY, None)
    model = build_meta_model(make_config(model_type, keys), getattr(torch, dtype.value))
    if keys.get("tie_word_embeddings") is False:
        untie_head(model)
    return model


def _lay_out_tensors(specs: Iterable[TensorSpec], file: str = "model") -> dict[str, TensorSlice]:
    """Places tensors one after the other in an imaginary file."""
    tensors: dict[str, TensorSlice] = {}
    offset = 0
    for spec in specs:
        tensors[spec.name] = TensorSlice(
            name=spec.name,
            file=file,
            offset=offset,
            num_bytes=spec.num_bytes,
            dtype=DTYPE_NAMES[spec.dtype],
            shape=spec.shape,
        )
        offset += spec.num_bytes
    return tensors


CONF = Path(__file__).resolve().parents[2] / "conf"


def architectures() -> dict[str, dict[str, object]]:
    """The architectures of the models in conf/model, by name."""
    values = {path.stem: read_yaml(path).get("architecture") for path in sorted((CONF / "model").glob("*.yaml"))}
    return {name: architecture for name, architecture in values.items() if isinstance(architecture, dict)}


def architecture_digest(architecture: Mapping[str, object]) -> str:
    return json_digest(to_plain(architecture))[:16]


def make_row(name: str, architecture: Mapping[str, object]) -> ShapeRow:
    """The row of a model in the file of shapes. Raises ConfigError for an unknown quantization method."""
    shapes, quantization, published = build_shapes(name, architecture), architecture.get(QUANTIZATION_KEY), None
    if isinstance(quantization, Mapping):
        published = published_shape(shapes[STORED_DTYPE], Publication.from_config(quantization))
    return to_row(shapes, architecture_digest(architecture), published)


def write_shapes(path: Path) -> Iterator[str]:
    """Yields the name of each model when its shape is computed, then writes the file `path`. Raises OutputError."""
    lines: list[str] = []
    for name, architecture in architectures().items():
        lines.append(json.dumps(make_row(name, architecture), separators=(",", ":")) + "\n")
        yield name
    text = "".join(lines).encode()
    publish(path, lambda file: write_all(file, text), exclusive=False)
