"""Finds and downloads a model's files (a directory, a GGUF file, a URL or a hub id); reads its config and tokenizer."""

import json
import logging
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, snapshot_download
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, __version__
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..cache_root import cache_root
from ..config.settings import RANDOM, TINY, ModelConfig
from ..config.texts import is_url
from ..errors import CheckpointError, ConfigError
from ..foreign import deepseek_moe
from ..remote.copies import local_copy
from ..remote.object_store import ObjectStore, RetryPolicy, never
from ..store.checkpoint import (
    INDEX_SUFFIX,
    SINGLE,
    Checkpoint,
    find_weights,
    is_gguf,
    is_index,
    list_names,
    no_weights_error,
    open_checkpoint,
    shard_names,
)
from ..store.gguf import quick_gguf_package, read_gguf
from ..store.json_object import read_json_object
from ..store.striped_store import named_directories
from ..synthesize.checkpoints import random_checkpoint
from ..synthesize.tokenizer import (
    UnsupportedSentencePieceError,
    find_sentencepiece,
    load_local_tokenizer,
    tokenizes_like_file,
)
from .config_rules import (
    CONFIG,
    MAX_SETTINGS_BYTES,
    TEMPLATES,
    TOKENIZER_CONFIG,
    code_keys,
    remove_code_keys,
    require_valid_config,
    vetted_directory,
)
from .download import as_checkpoint_error
from .gguf_tokenizer import load_gguf_tokenizer
from .localize import find_local_path, missing_weights_error

log = logging.getLogger(__name__)

SETTINGS = ["*.json", "*.model", "*.txt", "*.jinja", "tokenizer*"]  # config and tokenizer files
IN_FOLDERS = ["*/*"]  # files in subdirectories; in the hub's patterns, * also matches slashes
GGUF_WIDTHS = {  # metadata key -> config attribute; transformers ignores this metadata and uses default widths
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
BUNDLED = Path(__file__).parents[1] / "data" / "tiny"  # made by scripts.train_tiny
TOKENIZER_KEY = "model.tokenizer"
GGUF_READER = "transformers.integrations.gguf"  # exists in transformers 5.18 and newer


def find_checkpoint(config: ModelConfig, cache_dir: str | None, should_stop: Callable[[], bool] = never) -> Path:
    """Returns the local directory or GGUF file of a model; downloads it from a URL or the hub if necessary."""
    if config.path is None:
        if config.name == TINY:
            return BUNDLED
        if config.name == RANDOM:
            return random_checkpoint(cache_root(cache_dir) / "tiny")
        raise ConfigError(f"model={config.name} needs model.path: a local directory, a GGUF file or a hub id")
    if (path := find_local_path(config)) is not None:
        return path
    if is_url(config.path):
        # First the config and the index of shards, which lists the weight files. A GGUF file is copied completely here.
        url, key = config.path, "model.path"
        copy = _copy_from_url(url, key, [CONFIG, f"*{INDEX_SUFFIX}"], cache_dir, should_stop)
        if copy.is_file():
            return copy
        names = ObjectStore(url, key, RetryPolicy(should_stop=should_stop)).list_files(is_deep=False)
        entry = find_weights(copy, names)
        if entry is None:
            raise no_weights_error(url, names, is_local=False)
        if named_directories(entry):
            raise CheckpointError(f"{key}={url}: a striped store is only read from local directories")
        return _copy_from_url(url, key, [*SETTINGS, *map(escape, shard_names(entry))], cache_dir, should_stop)
    try:
        return _download_model(config.path, config.revision)
    except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise missing_weights_error(config, f"not found on the hub or in its cache: {reason}") from error


def _download_model(model: str, revision: str | None) -> Path:
    """Downloads a hub model, or finds it in the hub's cache: settings and tokenizer, then only the weight files that
    will be read."""
    snapshot = download_settings(model, revision)

    def fetch(names: Sequence[str]) -> None:
        # config.json is in the patterns since it exists: the hub client warns if no file matches
        snapshot_download(model, revision=snapshot.name, allow_patterns=[CONFIG, *map(escape, names)])

    named = find_weights(snapshot, names=())
    fetch([SINGLE if named is None else named.name])
    entry = find_weights(snapshot)
    if entry is None:
        try:
            names = HfApi().list_repo_files(model, revision=snapshot.name)
        except Exception:  # offline, or another HTTP error; the missing weights are the error to report
            names = list_names(snapshot)
        raise no_weights_error(model, names, is_local=False)
    if is_index(entry) and entry.is_file():
        fetch(shard_names(entry))
    return snapshot


def download_settings(model: str, revision: str | None) -> Path:
    """Downloads a hub model's config and tokenizer files. Returns the local snapshot directory; its name is the commit,
    so later downloads use the same revision."""
    snapshot = Path(snapshot_download(model, revision=revision, allow_patterns=SETTINGS, ignore_patterns=IN_FOLDERS))
    if (snapshot / TOKENIZER_CONFIG).is_file():
        templates = [TOKENIZER_CONFIG, f"{TEMPLATES}/*.jinja"]
        snapshot_download(model, revision=snapshot.name, allow_patterns=templates)
    return snapshot


def _copy_from_url(
    url: str, key: str, patterns: Sequence[str], cache_dir: str | None, should_stop: Callable[[], bool]
) -> Path:
    store = ObjectStore(url, key, RetryPolicy(should_stop=should_stop))
    return local_copy(store, cache_root(cache_dir), patterns, CheckpointError)


def read_config(path: Path, *, num_tensors: int | None = None) -> PreTrainedConfig:
    """Reads config.json, or converts a GGUF file's metadata, which needs the package `gguf`. Never loads code that the
    checkpoint names.

    `num_tensors`: tensors in the checkpoint, an upper bound for the number of layers. Raises CheckpointError with file,
    key, value and valid values.
    """
    deepseek_moe.register()
    if is_gguf(path):
        return _read_gguf_config(path)
    file = path / CONFIG
    try:
        values = read_json_object(file, max_bytes=MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no config.json") from None
    if keys := code_keys(values):
        log.info("%s: ignored: %s; only installed code runs", file, ", ".join(keys))
    values = remove_code_keys(values)
    require_valid_config(values, file, num_tensors=num_tensors)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{file}: model_type must name a model type of transformers, got {model_type!a:.60}")
    if model_type not in CONFIG_MAPPING:
        close = get_close_matches(model_type, list(CONFIG_MAPPING), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise CheckpointError(f"{file}: transformers {__version__} has no model type {model_type!a:.60}{hint}")
    with TemporaryDirectory(prefix="weightstream-") as home:
        (Path(home) / CONFIG).write_text(json.dumps(values), encoding="utf-8")
        with as_checkpoint_error(f"{path}: unusable config.json"):
            config = AutoConfig.from_pretrained(home)
    config.name_or_path = str(path)
    return config


def _read_gguf_config(path: Path) -> PreTrainedConfig:
    """Converts a GGUF file's metadata to a config with transformers, and corrects the widths that it ignores."""
    if find_spec("gguf") is None:
        raise ConfigError(f"model.path={path} is a GGUF file, which needs the extra: pip install 'weightstream[gguf]'")
    if find_spec(GGUF_READER) is None:
        raise ConfigError(
            f"model.path={path} is a GGUF file, which needs transformers 5.18 or newer, not {__version__}: upgrade, or "
            "use a directory of safetensors"
        )
    with as_checkpoint_error(f"{path}: transformers cannot make a config from its metadata"), quick_gguf_package():
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    header = read_gguf(path)
    for key, attribute in GGUF_WIDTHS.items():
        width = header.metadata.get(f"{header.architecture}.{key}")
        if width is not None and hasattr(config, attribute):
            setattr(config, attribute, width)
    return config


def find_tokenizer(config: ModelConfig, cache_dir: str | None) -> PreTrainedTokenizerBase | None:
    """Loads a model's tokenizer without the model. Returns None if the model has no tokenizer."""
    checkpoint = open_checkpoint(find_checkpoint(config, cache_dir), config.mirrors)
    return load_tokenizer(config.tokenizer, checkpoint, cache_dir)


def load_tokenizer(
    setting: str | None, checkpoint: Checkpoint, cache_dir: str | None = None
) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer that `setting` (model.tokenizer) names, or the checkpoint's own if `setting` is None. Returns
    None if the checkpoint has no tokenizer: prompts must then be token ids."""
    path, gguf = checkpoint.path, checkpoint.gguf
    if gguf is not None:
        has_own = "tokenizer.ggml.tokens" in gguf.metadata
    else:
        has_own = any(any(path.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model"))
    if setting is None and not has_own:
        return None
    error_prefix = f"model.tokenizer={setting or path}: cannot be loaded"
    if setting is None and gguf is not None:
        return load_gguf_tokenizer(path, gguf, error_prefix)
    directory = path if setting is None else _find_tokenizer_path(setting, cache_dir)
    if (model := find_sentencepiece(directory)) is None:
        return _load_tokenizer_directory(directory, error_prefix)
    try:
        return load_local_tokenizer(model, TOKENIZER_KEY)
    except UnsupportedSentencePieceError:
        # transformers may choose a wrong tokenizer class: use its tokenizer only if it gives the SentencePiece tokens.
        if directory.is_dir():
            tokenizer = _load_tokenizer_directory(directory, error_prefix)
            if tokenizes_like_file(tokenizer, model, TOKENIZER_KEY):
                return tokenizer
        raise


def _load_tokenizer_directory(directory: Path, error_prefix: str) -> PreTrainedTokenizerBase:
    with vetted_directory(directory) as view, as_checkpoint_error(error_prefix):
        tokenizer = AutoTokenizer.from_pretrained(view, padding_side="left")
    tokenizer.name_or_path = str(directory)
    return tokenizer


def _find_tokenizer_path(setting: str, cache_dir: str | None) -> Path:
    """Returns the local directory or SentencePiece model file of `model.tokenizer`."""
    if is_url(setting):
        return _copy_from_url(setting, TOKENIZER_KEY, SETTINGS, cache_dir, never)
    path = Path(setting).expanduser()
    if path.is_dir() or (path.is_file() and find_sentencepiece(path) is not None):
        return path
    if path.is_file():
        raise ConfigError(
            f"model.tokenizer={setting} is a file: set it to its directory, or to a SentencePiece model (*.model)"
        )
    with as_checkpoint_error(f"model.tokenizer={setting}: neither a directory nor a hub id that can be downloaded"):
        return download_settings(setting, None)
