"""The registry of storage formats by name and of quantization methods by their name in configs, from `kinds/`."""

from collections.abc import Mapping
from importlib import import_module
from itertools import chain
from pkgutil import iter_modules

from ..errors import CheckpointError
from ..plan.shape.shapes import TensorSlice
from . import kinds
from .storage_format import Loss, Method, StorageFormat

MODULES = [import_module(f"{kinds.__name__}.{module.name}") for module in iter_modules(kinds.__path__)]
FORMATS: Mapping[str, StorageFormat] = {each.name: each for module in MODULES for each in module.FORMATS}
LOSSES: Mapping[str, Loss] = {name: each.loss for name, each in FORMATS.items()}


# Several formats may share a method's name: each pairs the tensors that it knows.
METHODS: dict[str, list[Method]] = {}
for _module in MODULES:
    for _name, _method in getattr(_module, "METHODS", {}).items():
        METHODS.setdefault(_name, []).append(_method)


def pair_companions(
    tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]
) -> Mapping[str, TensorSlice]:
    """Combines tensors into weights under the weights' own names and shapes, with formats and companions. If the config
    names no method, all methods are tried on the tensors' names. Raises CheckpointError for companions that do not fit
    their weight."""
    named = str(quantization.get("quant_method") or "")
    for method in METHODS[named] if named else chain.from_iterable(METHODS.values()):
        tensors = method(tensors, quantization)
    return tensors


def is_output_major(tensor: TensorSlice) -> bool:
    return bool(tensor.format) and FORMATS[tensor.format].is_output_major


def require_readable(method: str) -> None:
    """Raises CheckpointError for an unsupported quantization method."""
    if method not in METHODS:
        raise CheckpointError(
            f"model.path: its weights are quantized by {method!r:.80}, which cannot be read. Can be: "
            f"{', '.join(sorted(METHODS))}, GGUF (model.path=FILE.gguf) and the unquantized checkpoint; most models "
            "have one"
        )
