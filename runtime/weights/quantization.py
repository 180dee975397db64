"""What a config says of the way its weights are stored."""

from collections.abc import Mapping

from transformers import PreTrainedConfig

from ..formats.registry import require_readable


def take_quantization(config: PreTrainedConfig) -> Mapping[str, object]:
    """What the config says of it, {} if nothing. Removes it from `config`: the model is built as if it had none.

    Raises CheckpointError for a method that cannot be read.
    """
    found: dict[str, object] = {}
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            found = found or dict(getattr(part, key, None) or {})
            if hasattr(part, key):
                delattr(part, key)
    if found:
        require_readable(str(found.get("quant_method") or "bitsandbytes"))
    return found
