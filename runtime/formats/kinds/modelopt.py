"""NVIDIA ModelOpt: FP8 with a factor per tensor (`weight_scale`), and NVFP4, which has a factor per 16 columns
(`weight_scale`) and one per tensor (`weight_scale_2`)."""

from collections.abc import Mapping

from ...plan.shape.shapes import TensorSlice
from ..module_tensors import (
    FLOATS,
    ModuleTensors,
    get_mapping,
    modules_with,
    replace_tensors,
    unsupported_error,
    warn_activations,
    warn_kv_cache,
)
from ..storage_format import StorageFormat
from .fp8 import DEFAULT_BLOCK, DTYPES, fp8_weight
from .nvfp4 import nvfp4_weight

READABLE = "ModelOpt's FP8 and NVFP4"
LEAVES = ("weight", "weight_scale", "weight_scale_2", "input_scale")


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `storage_format.Method`."""
    if str(quantization.get("quant_method")) not in METHODS:
        return tensors
    weights = {module.path: _weight(module) for module in modules_with(tensors, "weight_scale")}
    if any(module.find("input_scale") is not None for module in modules_with(tensors, "weight_scale")):
        warn_activations(str(quantization.get("quant_algo") or "input_scale"))
    if quantization.get("kv_cache_scheme") or get_mapping(quantization, "quantization").get("kv_cache_quant_algo"):
        warn_kv_cache()
    return replace_tensors(tensors, weights, LEAVES)


def _weight(module: ModuleTensors) -> TensorSlice:
    weight, overall = module.require("weight", *DTYPES, "U8", "I8"), module.find("weight_scale_2")
    scales = module.require("weight_scale", *FLOATS, "F8_E4M3")
    if weight.dtype in DTYPES and overall is None:
        return fp8_weight(weight, scales, DEFAULT_BLOCK)
    if weight.dtype != "U8" or overall is None or module.find("pre_quant_scale") is not None:
        raise unsupported_error(f"{weight.name!r} is {weight.dtype}, in a format of ModelOpt", READABLE)
    return nvfp4_weight(weight, scales, module.require("weight_scale_2", "F32"), divides=False)


FORMATS = tuple[StorageFormat, ...]()
METHODS = {"modelopt": _pair, "modelopt_fp4": _pair}
