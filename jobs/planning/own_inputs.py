"""Reads the user's model and data set for a plan: config.json, headers of weight files, and a sample of prompts."""

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PreTrainedTokenizerBase

from runtime.checkpoint_source.config_rules import CONFIG, MAX_SETTINGS_BYTES
from runtime.checkpoint_source.download import short_reason
from runtime.checkpoint_source.localize import find_local_path
from runtime.checkpoint_source.location import download_settings, find_checkpoint, load_tokenizer
from runtime.config.settings import ANY, DType, ModelConfig
from runtime.config.texts import is_url
from runtime.errors import CheckpointError, ConfigError, DatasetError, require
from runtime.model.loading import load_model
from runtime.plan.shape.dtypes import WeightStorage
from runtime.plan.shape.model import ModelShape
from runtime.requests.chat import ChatRenderer, TemplateRefusal
from runtime.store.checkpoint import Checkpoint, find_weights, is_gguf, shard_names
from runtime.store.gguf import read_gguf
from runtime.store.json_object import read_json_object
from runtime.store.striped_store import stripe_directories
from runtime.units import format_count

from ..datasets.config import KINDS, DatasetConfig
from ..datasets.rows import Row
from .config import PlanConfig, WorkloadConfig
from .named import QUANTIZATION_KEY, make_row
from .shapes import shape_from_row

log = logging.getLogger(__name__)
NUM_SAMPLES = 512  # prompts that are tokenized


@cache
def read_own_shape(
    model: ModelConfig,
    dtype: DType,
    cache_dir: str | None,
    *,
    is_plain: bool,
    has_device: bool,
    is_mtp_head: bool = False,
) -> tuple[ModelShape, WeightStorage | None]:
    """The shape of a model (tensors and their sizes) and the storage formats of its weights.

    They are read from the headers of local files. Without local files, the shape is computed from config.json, for
    weights in bfloat16 or as quantized there; the second value is then None. `is_plain`: the shape of the unquantized
    model. `has_device`: an accelerator computes. `is_mtp_head`: of the checkpoint's MTP head, which needs the weights'
    headers. Reads no weights. Raises CheckpointError and ConfigError.
    """
    path = _local_model(model, cache_dir)
    if path is not None and _has_weights(path, model.mirrors):
        setting = replace(model, path=str(path), name=ANY, dtype=dtype)
        loaded = load_model(setting, torch.device("cpu"), cache_dir, is_mtp_head=is_mtp_head)
        name = model.name if model.path is None else path.name
        shape = replace(loaded.shape, name=name, has_decode_kernel=loaded.shape.has_decode_kernel and not has_device)
        slices = (each for stage in shape.stages for parameter in stage.parameters for each in parameter.slices)
        if not is_plain or not any(each.format for each in slices):
            return shape, loaded.stored
        if is_gguf(path):
            raise ConfigError(
                f"plan.format needs unquantized weights, and model.path={path} is a GGUF file: leave it out"
            )
    directory = _settings_directory(model) if path is None else path
    log.info("%s: sizes by config.json, as there are no weights to look at", directory)
    try:
        values = read_json_object(directory / CONFIG, max_bytes=MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"model.path={directory} has no {CONFIG}, from which a plan takes the sizes") from None
    return shape_from_row(make_row(directory.name, _architecture(values)), dtype, is_plain=is_plain), None


def _has_weights(path: Path, others: Sequence[str]) -> bool:
    """True if all weights are in `path`, or it is the first directory of a striped store. Raises CheckpointError if
    another of its directories is missing."""
    if is_gguf(path):
        return True
    entry = find_weights(path)
    if entry is None or not entry.exists():
        return False
    return bool(stripe_directories(entry, others)) or all((path / name).exists() for name in shard_names(entry))


def _architecture(values: Mapping[str, object]) -> dict[str, object]:
    """The keys of a config.json that transformers' config class knows, and its quantization. Raises ConfigError without
    a model type."""
    require("model_type" in values, f"{CONFIG} has no model_type: it is none of transformers")
    kind = CONFIG_MAPPING[str(values["model_type"])]() if values.get("model_type") in CONFIG_MAPPING else None
    ignored = {"dtype", "torch_dtype", "transformers_version", "architectures"}
    known = {key: value for key, value in values.items() if key not in ignored and (kind is None or hasattr(kind, key))}
    extra = ("model_type", QUANTIZATION_KEY)
    return {**known, **{key: values[key] for key in extra if key in values}}


def _local_model(model: ModelConfig, cache_dir: str | None) -> Path | None:
    """The directory or file of a model on this machine; None if it is only on the hub."""
    if model.path is None:
        return find_checkpoint(model, cache_dir)  # bundled
    return find_local_path(model)


def _settings_directory(model: ModelConfig) -> Path:
    """The directory with config.json and tokenizer of a hub id. Downloads only these files. Raises ConfigError."""
    path = model.path
    if path is None or is_url(path):
        raise ConfigError(
            f"model.path={path}: weightstream plan reads no URLs: set it to a directory with its config.json"
        )
    try:
        return download_settings(path, model.revision)
    except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
        raise ConfigError(
            f"model.path={path}: config.json is neither here nor in the hub's cache: {short_reason(error)}; "
            "a plan needs a directory with config.json, and model.tokenizer=DIR to count tokens of dataset.path"
        ) from error


def with_own_prompts(config: PlanConfig, dataset: DatasetConfig) -> PlanConfig:
    """The settings with the number and lengths of the prompts in `dataset.path`. Values that are set in `workload`
    stay. Tokenizes a random sample of prompts, and the longest text. Raises DatasetError and ConfigError."""
    rows = islice(KINDS[dataset.kind.name].rows(dataset, None), dataset.limit)
    sample, num_rows, num_bad, draw = list[Row](), 0, 0, random.Random(0)
    longest: Row | None = None
    for row in rows:
        if row.error is not None:
            num_bad += 1
            continue
        num_rows += 1
        if longest is None or _num_chars(row) > _num_chars(longest):
            longest = row
        # Reservoir sampling (Vitter 1985, algorithm R): every row so far has the same probability to be in the sample.
        if len(sample) < NUM_SAMPLES:
            sample.append(row)
        elif (index := draw.randrange(num_rows)) < NUM_SAMPLES:
            sample[index] = row
    if longest is None:
        raise DatasetError(f"none of {format_count(num_bad, 'row')} of {dataset.source_name} can be used")
    lengths = list(_prompt_lengths(config, [*sample, longest]))
    mean, most = sum(lengths[:-1]) / max(1, len(lengths) - 1), max(lengths)
    log.info(
        "%s: %s, %.0f tokens on average and %s at most, counted in %s of them%s",
        dataset.source_name, format_count(num_rows, "prompt"), mean, f"{most:,}", f"{len(sample):,}",
        f"; {format_count(num_bad, 'row')} cannot be used" if num_bad else "",
    )  # fmt: skip
    found = WorkloadConfig(num_requests=num_rows * dataset.repeat, mean_prompt_tokens=mean, max_prompt_tokens=most)
    changes = {key: value for key, value in vars(config.workload).items() if value is not None}
    return replace(config, workload=replace(found, **changes))


def _num_chars(row: Row) -> int:
    return len(row.prompt_ids or "") + len(row.prompt) + sum(len(str(each)) for each in row.messages or ())


def _prompt_lengths(config: PlanConfig, rows: list[Row]) -> Iterator[int]:
    """Yields the number of prompt tokens of each row."""
    with ExitStack() as stack:
        tokenizer = _find_tokenizer(config) if any(row.prompt_ids is None for row in rows) else None
        renderer: ChatRenderer | None = None
        for row in rows:
            if row.prompt_ids is not None:
                yield len(row.prompt_ids)
                continue
            if tokenizer is None:
                raise ConfigError(
                    "counting the tokens of prompts needs a tokenizer: set model.tokenizer, or workload.*"
                )
            if row.messages is None:
                yield len(tokenizer(row.prompt)["input_ids"])
                continue
            renderer = renderer or stack.enter_context(closing(ChatRenderer(tokenizer)))
            try:
                text = renderer.render(row.messages, row.template_kwargs)
            except TemplateRefusal as error:
                raise DatasetError(f"{row.id}: {error.as_error}") from error
            yield len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _find_tokenizer(config: PlanConfig) -> PreTrainedTokenizerBase | None:
    cache_dir = config.offload.cache_dir
    if config.model.tokenizer is not None:
        return load_tokenizer(config.model.tokenizer, Checkpoint(path=Path(), tensors={}), cache_dir)
    path = _local_model(config.model, cache_dir) or _settings_directory(config.model)
    checkpoint = Checkpoint(path=path, tensors={}, gguf=read_gguf(path) if is_gguf(path) else None)
    return load_tokenizer(config.model.tokenizer, checkpoint, cache_dir)
