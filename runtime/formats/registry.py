"""Registry of storage formats and of quantization methods (`quant_method`) by name, from the modules in `kinds/`."""

from collections.abc import Mapping
from importlib import import_module
from itertools import chain
from pkgutil import iter_modules

from ..errors import CheckpointError
from ..plan.shape.shapes import TensorSlice
from . import kinds
from .module_tensors import UNQUANTIZED
from .storage_format import Loss, Method, StorageFormat

MODULES = [import_module(f"{kinds.__name__}.{module.name}") for module in iter_modules(kinds.__path__)]
FORMATS: Mapping[str, StorageFormat] = {format.name: format for module in MODULES for format in module.FORMATS}
LOSSES: Mapping[str, Loss] = {name: format.loss for name, format in FORMATS.items()}
METHODS: dict[str, list[Method]] = {}  # modules may share a method's name: each pairs the tensors that it knows
for _module in MODULES:
    for _name, _method in getattr(_module, "METHODS", {}).items():
        METHODS.setdefault(_name, []).append(_method)


def pair_companions(
    tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]
) -> Mapping[str, TensorSlice]:
    """Combines tensors into weights with formats and companions. If the config names no method, tries all of them on
    the tensors' names. Raises CheckpointError for companions that do not fit their weight."""
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
            f"model.path: quantization method {method!r:.80} is not supported. Supported: "
            f"{', '.join(sorted(METHODS))}, GGUF (model.path=FILE.gguf), and {UNQUANTIZED}"
        )
