"""Writes checkpoints with random weights for transformers' model types, in the hub's file layout. Only one tensor at a
time is in memory."""

import contextlib
import copy
import difflib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import CheckpointError, ConfigError, OutputError
from ..foreign import deepseek_moe
from ..probing.meta import build_meta_model, untie_head
from ..store.writer import PUBLISHED_ALIGNMENT_BYTES, plan_shards, write_checkpoint, write_sparse_checkpoint
from ..units import GIB, format_bytes, format_count, format_seconds
from .random_weights import RandomWeights
from .tokenizer import byte_level_tokenizer, load_local_tokenizer

UNFINISHED_FILE = ".unfinished"  # exists and is locked while the directory is written
MARKER_FILE = "synthesis.json"  # written last: digest of the settings (recipe), size of every file
_RECIPE_VERSION = 1
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_UNDECLARED_KEYS = frozenset({"head_dim", "original_max_position_embeddings"})  # read by models, not in default configs
_RANDOM_OVERRIDES: Mapping[str, object] = {  # config of the model `random`
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SynthesisReport:
    """The size of a written checkpoint, and the time for writing it."""

    num_parameters: int
    num_bytes: int
    num_shards: int
    seconds: float

    def __str__(self) -> str:
        size, shards = format_bytes(self.num_bytes), format_count(self.num_shards, "shard")
        return f"{self.num_parameters:,} parameters, {size} in {shards}, written in {format_seconds(self.seconds)}"


def synthesize_checkpoint(
    *,
    model: str | PreTrainedConfig,
    directory: Path,
    overrides: Mapping[str, object] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5 * GIB,
    alignment_bytes: int = PUBLISHED_ALIGNMENT_BYTES,
    tokenizer_path: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SynthesisReport:
    """Writes a checkpoint of `model` with random weights. `model`: a transformers model type, or a config. `overrides`:
    values that differ from the model type's default config.

    Needs memory for the largest tensor and a few MiB. `alignment_bytes`: alignment of the tensors' data in a file. The
    ids of bos, eos and pad are the tokenizer's, unless overridden. Calls `progress(done_bytes, total_bytes)` before the
    first tensor and after each tensor. Raises ConfigError if `directory` is not empty or the config is invalid, and
    OutputError if it cannot be written. After an interruption, the same call begins again.
    """
    started = time.monotonic()
    overrides = dict(overrides or {})
    meta_model, tokenizer = _build_model(model, overrides, dtype, tokenizer_path)
    weights = RandomWeights(meta_model, seed)
    shards = plan_shards(weights.specs, max_shard_bytes)
    with _as_output_error(directory), _claim_directory(directory):
        tokenizer.save_pretrained(directory)
        _save_configs(meta_model, dtype, directory)
        tensors = _draw_all(weights, progress or (lambda done_bytes, total_bytes: None))
        num_bytes = write_checkpoint(directory, shards, tensors, alignment_bytes=alignment_bytes)
        marker = {
            "note": "random weights, written by Weightstream",
            "recipe": _recipe_digest(meta_model.config.model_type, overrides, seed, dtype),
            "files": {path.name: path.stat().st_size for path in sorted(directory.glob("[!.]*"))},
        }
        temp = directory / f".{MARKER_FILE}.tmp"
        temp.write_text(json.dumps(marker, indent=2) + "\n")
        temp.replace(directory / MARKER_FILE)  # atomic and last: its presence means that all files are complete
    return SynthesisReport(
        num_parameters=sum(spec.num_elements for spec in weights.specs),
        num_bytes=num_bytes,
        num_shards=len(shards),
        seconds=time.monotonic() - started,
    )


def create_sparse_checkpoint(
    *, model_type: str, directory: Path, overrides: Mapping[str, object], dtype: torch.dtype
) -> RandomWeights:
    """Writes a checkpoint whose weight files are sparse: they have headers, but no data. Returns the object that draws
    the weights directly into memory. Raises the errors of `synthesize_checkpoint`."""
    meta_model, tokenizer = _build_model(model_type, overrides, dtype, None)
    weights = RandomWeights(meta_model, 0)
    with _as_output_error(directory), _claim_directory(directory):
        tokenizer.save_pretrained(directory)
        _save_configs(meta_model, dtype, directory)
        write_sparse_checkpoint(directory, plan_shards(weights.specs, 5 * GIB))
    return weights


def _build_model(
    model: str | PreTrainedConfig, overrides: Mapping[str, object], dtype: torch.dtype, tokenizer_path: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Builds the model on the meta device, with a tokenizer and consistent token ids in its config."""
    # transformers would warn about token ids outside the vocabulary. Drop them; the tokenizer's ids replace them.
    size = overrides.get("vocab_size")
    is_outside = {
        key: isinstance(size, int) and isinstance(i := overrides.get(key), int) and i >= size for key in _TOKEN_KEYS
    }
    valid = {key: value for key, value in overrides.items() if not is_outside.get(key)}
    config = copy.deepcopy(model) if isinstance(model, PreTrainedConfig) else make_config(model, valid)
    text = config.get_text_config()
    heads, kv_heads = (getattr(text, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % max(1, kv_heads):
        raise ConfigError(
            f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}: change one of them"
        )
    vocab_size: int = text.vocab_size
    tokenizer = byte_level_tokenizer(vocab_size) if tokenizer_path is None else load_local_tokenizer(tokenizer_path)
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            f"tokenizer={tokenizer_path} has {len(tokenizer)} ids, the model's vocab_size is {vocab_size}: raise it"
        )
    # The tokenizer's ids replace ids that were not overridden, or that are outside the final vocabulary, whose size is
    # known only now. Overrides of None and lists stay.
    for key in _TOKEN_KEYS:
        token = getattr(text, key, None)
        may_stay = token is None or isinstance(token, list) or (isinstance(token, int) and token < vocab_size)
        if key not in valid or not may_stay:
            setattr(text, key, getattr(tokenizer, key))
    if config.is_encoder_decoder and getattr(text, "decoder_start_token_id", None) is None:
        setattr(text, "decoder_start_token_id", tokenizer.pad_token_id)  # noqa: B010 - not every config declares it
    try:
        meta_model = build_meta_model(config, dtype)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, AssertionError) as error:
        raise ConfigError(f"cannot build a {config.model_type} model from this config: {error}") from error
    if overrides.get("tie_word_embeddings") is False:
        untie_head(meta_model)
    return meta_model, tokenizer


def random_checkpoint(cache: Path, seed: int = 0) -> Path:
    """Returns the directory of the model `random`, a small Llama with random weights and a byte-level tokenizer. Writes
    it if it does not exist.

    The directory is in `cache` and named after the seed and a digest of the settings, so versions of Weightstream with
    other settings use other directories. Of concurrent callers, the first to finish provides the directory for all.
    Raises CheckpointError if the directory is incomplete, and OutputError if `cache` cannot be written.
    """
    digest = _recipe_digest("llama", _RANDOM_OVERRIDES, seed, torch.float32)
    directory = cache / f"seed-{seed}-{digest[:8]}"
    if _is_complete(directory, digest):
        return directory
    if directory.exists():
        raise CheckpointError(f"{directory} is not a complete random checkpoint: move it away")
    with _as_output_error(cache):
        cache.mkdir(parents=True, exist_ok=True)
        temp = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        written, overrides = temp / "checkpoint", _RANDOM_OVERRIDES
        synthesize_checkpoint(model="llama", overrides=overrides, directory=written, seed=seed, dtype=torch.float32)
        try:
            written.rename(directory)  # atomic; fails if a concurrent caller was first
        except OSError as error:
            if not _is_complete(directory, digest):
                raise OutputError(f"{directory} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temp)
    return directory


def make_config(model_type: str, overrides: Mapping[str, object]) -> PreTrainedConfig:
    """Returns the default config of a transformers model type with overrides. Raises ConfigError."""
    deepseek_moe.register()
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"unknown model type {model_type!r}{_did_you_mean(model_type, list(CONFIG_MAPPING))}")
    default = CONFIG_MAPPING[model_type]()
    for key in overrides:
        if not hasattr(default, key) and key not in _UNDECLARED_KEYS:
            hint = _did_you_mean(key, list(default.to_dict()))
            raise ConfigError(f"a {model_type} config has no key {key!r}{hint}")
    try:
        return AutoConfig.for_model(model_type, **overrides)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"invalid {model_type} config {dict(overrides)}: {error}") from error


def _did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


@contextlib.contextmanager
def _claim_directory(directory: Path) -> Iterator[None]:
    """Creates and locks a directory for writing. A directory that an interrupted writer left is used again, after
    deleting its weights. Raises ConfigError if the directory contains anything else."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"out={directory} is a file: set out to a directory that is empty or does not exist")
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / UNFINISHED_FILE
    if any(directory.iterdir()) and not unfinished.exists():
        raise ConfigError(f"out={directory} is not empty; nothing was changed: set out to another directory")
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):  # other errors mean that the file system has no locks
                raise ConfigError(f"another process writes to out={directory}: wait for it") from error
        # This process has the lock, so no other process writes these files.
        for leftover in (*directory.glob("*.safetensors"), *directory.glob(".*.tmp")):
            leftover.unlink()
        yield
        unfinished.unlink()


def _save_configs(model: PreTrainedModel, dtype: torch.dtype, directory: Path) -> None:
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def _draw_all(weights: RandomWeights, progress: Callable[[int, int], None]) -> Iterator[torch.Tensor]:
    """Yields the values of all tensors, one at a time in memory."""
    done_bytes, total_bytes = 0, sum(spec.num_bytes for spec in weights.specs)
    progress(done_bytes, total_bytes)
    for spec in weights.specs:
        tensor = weights.draw(spec)
        done_bytes += spec.num_bytes
        progress(done_bytes, total_bytes)
        yield tensor
        del tensor  # free it before the next one is drawn


def _recipe_digest(model_type: str, overrides: Mapping[str, object], seed: int, dtype: torch.dtype) -> str:
    recipe = [_RECIPE_VERSION, model_type, dict(overrides), seed, str(dtype)]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()


def _is_complete(directory: Path, digest: str) -> bool:
    """True if the directory has a marker with this recipe digest, and all files that the marker lists."""
    try:
        marker = json.loads((directory / MARKER_FILE).read_text())
        files: dict[str, int] = marker["files"]
        return marker["recipe"] == digest and all((directory / n).stat().st_size == size for n, size in files.items())
    except (OSError, ValueError, LookupError, TypeError):
        return False


@contextlib.contextmanager
def _as_output_error(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"out={directory} cannot be written: {error.strerror or error}") from error
