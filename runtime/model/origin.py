"""Where a model comes from: a directory of safetensors, a GGUF file or a hub id; its config, tokenizer and stop ids."""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError
from ..store.cache_root import cache_root
from ..store.checkpoint import Checkpoint, is_gguf
from ..store.gguf import read_gguf
from .foreign import deepseek_moe
from .synthesize import tiny_checkpoint

HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "tokenizer*"]
GGUF_WIDTHS = {  # metadata that transformers leaves out, so that its defaults would count
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
FILE_SUFFIXES = (".gguf", ".safetensors", ".bin")


def find_checkpoint(config: ModelConfig, cache_dir: str | None) -> Path:
    """A local directory or GGUF file, the built-in tiny model, or what the hub or its cache holds under the id."""
    if config.path is None:
        if config.name != "tiny":
            raise ConfigError(f"model={config.name} needs model.path: a local directory, a GGUF file or a hub id")
        return tiny_checkpoint(cache_root(cache_dir) / "tiny")
    path = Path(config.path).expanduser()
    if path.is_dir() or is_gguf(path):
        return path
    if path.suffix in FILE_SUFFIXES or config.path.startswith((".", "/", "~")) or config.path.count("/") > 1:
        raise CheckpointError(_three_ways(config, f"{path} is neither a directory nor a GGUF file"))
    try:
        return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=HUB_PATTERNS))
    except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(_three_ways(config, f"the hub and its cache gave nothing for it: {reason}")) from error


def _three_ways(config: ModelConfig, reason: str) -> str:
    return (
        f"model={config.name}: no weights at model.path={config.path}: {reason}\n"
        f"three ways on:\n"
        f"  1. hub: run `hf download {config.path}` where there is network (gated models: `hf auth login` first)\n"
        f"  2. local: model.path=/directory/with/config.json/and/safetensors or model.path=/file.gguf\n"
        f"  3. random weights: python -m jobs.synthesize model={config.name} out=DIR, then model.path=DIR"
    )


def read_config(path: Path) -> PreTrainedConfig:
    """config.json, or what transformers makes of a GGUF file's metadata, which takes the package `gguf`."""
    deepseek_moe.register()
    if not is_gguf(path):
        try:
            return AutoConfig.from_pretrained(path)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: no usable config.json: {error}") from error
    if find_spec("gguf") is None:
        raise ConfigError(f"model.path={path} is a GGUF file, which needs the extra: pip install 'millrace[gguf]'")
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, LookupError, ImportError) as error:
        raise CheckpointError(f"{path}: transformers makes no config of its metadata: {error}") from error
    header = read_gguf(path)
    for key, attribute in GGUF_WIDTHS.items():
        width = header.metadata.get(f"{header.architecture}.{key}")
        if width is not None and hasattr(config, attribute):
            setattr(config, attribute, width)
    return config


def load_tokenizer(wanted: str | None, checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The wanted one or the checkpoint's; None when it has none: token ids can still be generated from."""
    path, gguf = checkpoint.path, checkpoint.gguf
    if wanted is None and not (_has_tokenizer(path) if gguf is None else "tokenizer.ggml.tokens" in gguf.metadata):
        return None
    try:
        if wanted is None and gguf is not None:
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
        return AutoTokenizer.from_pretrained(wanted or path, padding_side="left")
    except (OSError, ValueError, LookupError, ImportError) as error:
        raise CheckpointError(f"model.tokenizer={wanted or path}: cannot be loaded: {error}") from error


def _has_tokenizer(directory: Path) -> bool:
    return any(any(directory.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model"))


def eos_token_ids(path: Path, config: PreTrainedConfig) -> frozenset[int]:
    eos = _token_id("eos_token_id", path, config)
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)


def start_token_id(path: Path, config: PreTrainedConfig) -> int:
    """What a decoder behind an encoder begins with. Raises CheckpointError where the checkpoint does not say."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        start = _token_id(name, path, config)
        if isinstance(start, int):
            return start
    raise CheckpointError(f"{path}: neither generation_config.json nor config.json has a decoder_start_token_id")


def _token_id(name: str, path: Path, config: PreTrainedConfig) -> int | list[int] | None:
    """As transformers' generate finds it: in generation_config.json if there is one, which a GGUF file has not, else in
    the config."""
    if not is_gguf(path):
        with suppress(OSError):  # there is none
            return getattr(GenerationConfig.from_pretrained(path), name)
    return getattr(config.get_text_config(), name, None)
