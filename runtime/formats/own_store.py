"""The names of tensors in a store that `millrace pack` wrote, and how they are paired: `X_FORMAT` and its companion. It
stands alone since every format of our own has them."""

from collections.abc import Callable, Mapping
from math import inf

from ..errors import CheckpointError
from ..plan.shape.shapes import TensorSlice

METHOD = "millrace"  # `quant_method` in the store's config.json
RELATIVE_ERROR = "relative_rms_error"  # beside it: of all weights that were rounded
Fit = Callable[[TensorSlice, TensorSlice], TensorSlice]  # bytes and companion -> the weight


def relative_error(quantization: Mapping[str, object]) -> float | None:
    """What a store's config says of how far its weights are off; None where it says nothing, or what cannot be."""
    found = quantization.get(RELATIVE_ERROR)
    return float(found) if isinstance(found, int | float) and 0 <= found < inf else None


def name_of(weight: str, part: str) -> str:
    return f"{weight}_{part}"


def paired(
    tensors: Mapping[str, TensorSlice],
    quantization: Mapping[str, object],
    part: str,
    companion: str,
    fit: Fit,
) -> Mapping[str, TensorSlice]:
    """Returns the tensors, each weight that lies in `part` and `companion` under its own name. Raises CheckpointError
    for one that lacks its companion, and where the config does not say that this is a store of ours: nothing would be
    compared with its sums."""
    result, suffix = dict(tensors), name_of("", part)
    for name, tensor in tensors.items():
        weight = name.removesuffix(suffix)
        if weight == name or tensor.dtype not in ("U8", "I8"):
            continue
        beside = result.pop(name_of(weight, companion), None)
        if beside is None:
            raise CheckpointError(f"{tensor.file}: {name!r} lacks {name_of(weight, companion)!r} beside it")
        if quantization.get("quant_method") != METHOD:
            raise CheckpointError(
                f"{tensor.file}: {name!r} is of a store that `millrace pack` wrote, but config.json lacks its "
                "quantization_config: take the config.json that was written beside it"
            )
        result[weight] = fit(result.pop(name), beside)
    return result


def unfit(body: TensorSlice, beside: TensorSlice) -> CheckpointError:
    return CheckpointError(
        f"{body.file}: {beside.name!r}, {beside.dtype} of shape {beside.shape}, does not fit {body.name!r} of shape "
        f"{body.shape}: pack the model anew"
    )
