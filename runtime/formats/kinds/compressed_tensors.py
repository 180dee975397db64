"""The method `compressed-tensors` (llm-compressor): recognizes each module's format by its tensors' names and dtypes.

    weight_packed in I32, weight_shape    pack-quantized: integers of 4 or 8 bits in words
    weight_packed in U8                   nvfp4-pack-quantized with weight_global_scale, mxfp4-pack-quantized without
    weight in I8                          int-quantized, naive-quantized
    weight in F8                          float-quantized, mxfp8-quantized

Modules in the config's `ignore` list have an unquantized `weight`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ...plan.shape.shapes import TensorSlice
from ...store.checkpoint import read_integers
from ..module_tensors import (
    FLOATS,
    ModuleTensors,
    get_mapping,
    modules_with,
    replace_tensors,
    require_matrix,
    unsupported_error,
    warn_activations,
    warn_kv_cache,
)
from ..scaled_rows import WORD_BITS, attach_factors
from ..storage_format import StorageFormat
from .fp8 import DTYPES, block_shape, fp8_weight
from .integers import WORDS, integers_in_words, plain_integers
from .mxfp4 import BLOCK_COLUMNS
from .mxfp4 import NAME as MXFP4
from .nvfp4 import nvfp4_weight

READABLE = (  # for messages
    "compressed-tensors' pack-quantized of 4 or 8 bits, int-quantized, naive-quantized, float-quantized, "
    "mxfp8-quantized, nvfp4-pack-quantized and mxfp4-pack-quantized"
)
UNREADABLE = ("sparse-24-bitmask", "sparse-bitmask", "marlin-24", "mxfp6-pack-quantized")
DENSE = (None, "", "dense")  # values of sparsity_config.format without sparsity
ORDERED = ("group", "dynamic", True)  # values of `actorder` with `weight_g_idx`
LEAVES = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "input_scale", "input_zero_point", "input_global_scale", "output_scale",
    "output_zero_point",
)  # fmt: skip


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `storage_format.Method`."""
    if quantization.get("quant_method") != "compressed-tensors":
        return tensors
    groups = [group for group in get_mapping(quantization, "config_groups").values() if isinstance(group, Mapping)]
    sparsity = get_mapping(quantization, "sparsity_config").get("format")
    if sparsity not in DENSE:
        raise unsupported_error(f"its weights are sparse ({sparsity!r})", READABLE)
    for name in (quantization.get("format"), *(group.get("format") for group in groups)):
        if name in UNREADABLE:
            raise unsupported_error(f"its weights are in the format {name!r}", READABLE)
    if get_mapping(get_mapping(quantization, "transform_config"), "config_groups"):
        raise unsupported_error("it rotates weights and activations (transform_config)", READABLE)
    inputs = next(filter(None, (get_mapping(group, "input_activations") for group in groups)), None)
    if inputs is not None:
        kind = "dynamic" if inputs.get("dynamic") else "static"
        warn_activations(f"{inputs.get('type', 'int')}{inputs.get('num_bits', 8)}, {kind}")
    if quantization.get("kv_cache_scheme"):
        warn_kv_cache()
    schemes = [get_mapping(group, "weights") for group in groups]
    modules = chain(modules_with(tensors, "weight_packed"), modules_with(tensors, "weight_scale"))
    by_path = {module.path: module for module in modules}
    weights = {path: _weight(module, schemes) for path, module in by_path.items()}
    return replace_tensors(tensors, weights, LEAVES)


def _weight(module: ModuleTensors, schemes: Iterable[Mapping[str, object]]) -> TensorSlice:
    """Returns a module's weight with companions. `schemes`: `weights` of each entry in `config_groups`."""
    packed = module.find("weight_packed")
    if packed is None:
        weight = module.require("weight", "I8", *DTYPES)
        if weight.dtype == "I8":
            require_matrix(weight)
            return plain_integers(weight, module.require("weight_scale", *FLOATS), _zeros(module, "I8"))
        scales = module.require("weight_scale", *FLOATS, "U8", "F8_E8M0")
        blocks = [scheme["block_structure"] for scheme in schemes if scheme.get("block_structure")]
        return fp8_weight(weight, scales, block_shape(blocks[0] if blocks else None))
    if packed.dtype == "I32":
        return _word_weight(module, packed, schemes)
    packed = module.require("weight_packed", "U8")
    if module.find("weight_global_scale") is not None:
        scales, overall = module.require("weight_scale", "F8_E4M3"), module.require("weight_global_scale", "F32")
        return nvfp4_weight(packed, scales, overall, divides=True)
    scales = module.require("weight_scale", "U8", "F8_E8M0")
    height, width = require_matrix(packed)
    numbers = replace(packed, dtype="F4", format=MXFP4, shape=(height, 2 * width))
    return attach_factors(numbers, scales, 1, BLOCK_COLUMNS)


def _zeros(module: ModuleTensors, *dtypes: str) -> TensorSlice | None:
    """Returns the zero points; None if the module has none (symmetric quantization)."""
    leaf = "weight_zero_point"
    return None if module.find(leaf) is None else module.require(leaf, *dtypes)


def _word_weight(module: ModuleTensors, words: TensorSlice, schemes: Iterable[Mapping[str, object]]) -> TensorSlice:
    """Returns the weight of integers in words. Its number of bits is that of the scheme that matches the number of
    words: the config assigns schemes to modules only by patterns."""
    num_rows, num_words = require_matrix(words)
    shape = read_integers(module.require("weight_shape", "I32", "I64"))
    candidates = [scheme for scheme in schemes if _num_words(shape, scheme) == num_words]
    num_bits = next((bits for scheme in candidates for bits in WORDS if scheme["num_bits"] == bits), None)
    if len(shape) != 2 or shape[0] != num_rows or num_bits is None:
        problem = f"{words.name!r} has {num_words} words in each of {num_rows} rows for weight_shape {[*shape]}"
        raise unsupported_error(f"{problem}, which matches no packing of 4 or 8 bits in its config_groups", READABLE)
    groups = module.find("weight_g_idx")  # if it exists, it is used even if the config has no `actorder`
    if groups is not None or any(scheme.get("actorder") in ORDERED for scheme in candidates):
        groups = module.require("weight_g_idx", "I32")
    scales = module.require("weight_scale", *FLOATS)
    return integers_in_words(words, (num_rows, shape[1]), num_bits, scales, _zeros(module, "I32", "I8"), groups)


def _num_words(shape: Sequence[int], scheme: Mapping[str, object]) -> int | None:
    """Returns the number of words per row of a weight of `shape`; None if the scheme does not pack integers."""
    num_bits = scheme.get("num_bits")
    if not shape or type(num_bits) is not int or scheme.get("type", "int") != "int" or not 0 < num_bits <= WORD_BITS:
        return None
    return -(-shape[-1] * num_bits // WORD_BITS)


FORMATS = tuple[StorageFormat, ...]()
METHODS = {"compressed-tensors": _pair}
