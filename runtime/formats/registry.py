"""Registry of all modules in `kinds/`: storage formats by name, and readers of checkpoints by `quant_method`."""

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
METHODS: dict[str, list[Method]] = {}  # by `quant_method`; several modules may read different tensors of one method
for _module in MODULES:
    for _name, _method in getattr(_module, "METHODS", {}).items():
        METHODS.setdefault(_name, []).append(_method)


def pair_companions(
    tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]
) -> Mapping[str, TensorSlice]:
    """Attaches scales, zero points and other companions to the quantized weights that they belong to, and sets the
    weights' storage formats. `quantization`: the config's quantization_config. If it has no `quant_method`, applies all
    methods: each changes only tensors whose names it knows. Raises CheckpointError for companions that do not fit."""
    quant_method = str(quantization.get("quant_method") or "")
    for method in METHODS[quant_method] if quant_method else chain.from_iterable(METHODS.values()):
        tensors = method(tensors, quantization)
    return tensors


def is_output_major(tensor: TensorSlice) -> bool:
    """True if the tensor's format always stores one row per output; see `StorageFormat`."""
    return bool(tensor.format) and FORMATS[tensor.format].is_output_major


def require_readable(method: str) -> None:
    """Raises CheckpointError for an unsupported quantization method."""
    if method not in METHODS:
        raise CheckpointError(
            f"model.path: quantization method {method!r:.80} is not supported. Supported: "
            f"{', '.join(sorted(METHODS))}, GGUF (model.path=FILE.gguf), and {UNQUANTIZED}"
        )
