"""Resolves `model.path` to a local directory or GGUF file. Has no slow imports, so jobs report a wrong path quickly."""

from pathlib import Path

from ..config.settings import ANY, ModelConfig
from ..config.texts import is_url
from ..errors import CheckpointError
from ..store.checkpoint import is_gguf

FILE_SUFFIXES = (".gguf", ".safetensors", ".bin")
MODEL_FILES = (*FILE_SUFFIXES, ".pt", ".pth", ".json", ".model", ".jinja")  # suffixes in a model's directory


def find_local_path(config: ModelConfig) -> Path | None:
    """Returns the directory or GGUF file of `model.path`, or None for a URL, a hub id or no path. Raises
    CheckpointError for any other file and for a path that does not exist."""
    if config.path is None or is_url(config.path):
        return None
    path = Path(config.path).expanduser()
    if path.is_dir() or is_gguf(path):
        return path
    if path.is_file():
        advice = f"set model.path={path.parent}" if path.suffix in MODEL_FILES else "set it to one of these"
        raise CheckpointError(f"model.path={config.path} is a file, neither a directory nor GGUF: {advice}")
    if path.suffix in FILE_SUFFIXES or config.path.startswith((".", "/", "~")) or config.path.count("/") > 1:
        raise missing_weights_error(config, f"{path} is neither a directory nor a GGUF file")
    return None


def missing_weights_error(config: ModelConfig, reason: str) -> CheckpointError:
    """Makes the error for a missing model, with three ways to get one."""
    shape = config.name if config.name != ANY else "llama-3.2-1b"  # model=hf has no shape to synthesize
    return CheckpointError(
        f"model={config.name}: no weights at model.path={config.path}: {reason}\n"
        f"choose one of:\n"
        f"  1. hub: run `hf download {config.path}` where there is network (gated models: `hf auth login` first)\n"
        f"  2. local, or a URL: model.path=/directory/with/config.json/and/safetensors or model.path=/file.gguf\n"
        f"  3. random weights: python -m jobs.synthesize model={shape} out=DIR, then model.path=DIR"
    )
