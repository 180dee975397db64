"""Combines checkpoint tensors into weights: the tensors of one module in published quantized checkpoints, and
`X_FORMAT` with its companion in a store that `weightstream pack` wrote. Quantization settings that are not supported
raise an error or log a warning; none is ignored silently."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, prod

from ..errors import CheckpointError
from ..plan.shape.dtypes import FLOATS as FLOATS
from ..plan.shape.shapes import Companion, TensorSlice
from ..store.checkpoint import read_integers
from .scaled_rows import SCALES

log = logging.getLogger(__name__)

MOST_SHOWN = 400  # characters of a config value in messages
UNQUANTIZED = "the unquantized checkpoint; most models have one"
ZEROS, GROUPS = "zeros", "groups"  # companion roles: zero points; the group of each column
METHOD = "weightstream"  # `quant_method` in the store's config.json
RELATIVE_ERROR = "relative_rms_error"  # next to it: over all rounded weights
MakeWeight = Callable[[TensorSlice, TensorSlice], TensorSlice]  # bytes and companion -> the weight


def unsupported_error(what: str, readable: str) -> CheckpointError:
    """Returns the error for an unsupported variant; it lists the supported ones (`readable`)."""
    what = what if len(what) <= MOST_SHOWN else f"{what[:MOST_SHOWN]}..."
    return CheckpointError(f"model.path: {what}, which cannot be read. Can be: {readable}, and {UNQUANTIZED}")


def warn_activations(scheme: str) -> None:
    """Logs a warning that activations are not quantized although the config says so."""
    log.warning(
        "model.path: its config quantizes activations (%s); here they are not quantized, only its weights are",
        scheme,
    )


def warn_kv_cache() -> None:
    log.warning("model.path: its config quantizes keys and values; here they are kept in the compute dtype")


def get_mapping(values: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Returns the mapping under a key of the config; {} if it is missing or not a mapping."""
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def get_integer(values: Mapping[str, object], key: str, default: int) -> int:
    """Returns the integer under a key, or `default` if it is missing. Raises CheckpointError for another type."""
    found = values.get(key)
    if found is None:
        return default
    if type(found) is not int:
        raise CheckpointError(f"config.json: quantization_config.{key} is {found!r:.40}; must be an integer")
    return found


@dataclass(frozen=True)
class ModuleTensors:
    """A module's tensors, by name relative to its `path`, which ends in a dot."""

    path: str
    tensors: Mapping[str, TensorSlice]  # the whole checkpoint's

    def find(self, leaf: str) -> TensorSlice | None:
        return self.tensors.get(self.path + leaf)

    def require(self, leaf: str, *dtypes: str) -> TensorSlice:
        """Returns a tensor. Raises CheckpointError if it is missing or its dtype is not one of `dtypes`."""
        found = self.find(leaf)
        if found is not None and found.dtype not in dtypes:
            raise CheckpointError(f"{found.file}: {found.name!r} is {found.dtype}; must be {' or '.join(dtypes)}")
        if found is None:
            file = next(tensor.file for name, tensor in self.tensors.items() if name.startswith(self.path))
            raise CheckpointError(f"{file}: {self.path + leaf!r} is missing; its module cannot be read without it")
        return found


def modules_with(tensors: Mapping[str, TensorSlice], leaf: str) -> Iterator[ModuleTensors]:
    """Yields the modules that have a tensor named `leaf`."""
    for name in tensors:
        path = name.removesuffix(leaf)
        if path != name and (not path or path.endswith(".")):
            yield ModuleTensors(path, tensors)


def replace_tensors(
    tensors: Mapping[str, TensorSlice], weights: Mapping[str, TensorSlice], leaves: Collection[str]
) -> Mapping[str, TensorSlice]:
    """Returns the tensors, with the `leaves` of each module in `weights` (by path) replaced by its `weight`."""
    result = dict(tensors)
    for path, weight in weights.items():
        for leaf in leaves:
            result.pop(path + leaf, None)
        result[f"{path}weight"] = weight
    return result


def require_matrix(tensor: TensorSlice) -> tuple[int, int]:
    """Returns the shape of a matrix. Raises CheckpointError for any other tensor."""
    if len(tensor.shape) != 2:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name!r} has shape {tensor.shape}; quantized weights in this format must "
            "be matrices"
        )
    return tensor.shape[0], tensor.shape[1]


def require_shape(tensor: TensorSlice, expected: tuple[int, ...], why: str) -> TensorSlice:
    """Returns the tensor. Raises CheckpointError if its shape is not `expected`."""
    if tensor.shape != expected:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} has shape {tensor.shape}; {why} needs {expected}")
    return tensor


def column_groups(groups: TensorSlice, num_columns: int, num_groups: int) -> Companion:
    """Returns the companion with the group of each column. Raises CheckpointError for group numbers out of range."""
    require_shape(groups, (num_columns,), "its module")
    found = read_integers(groups)
    if min(found, default=0) < 0 or max(found, default=0) >= num_groups:
        raise CheckpointError(
            f"{groups.file}: {groups.name!r} has groups {min(found)} to {max(found)}; must be 0 to {num_groups - 1}"
        )
    return Companion(role=GROUPS, tensor=groups)


def row_factors(factors: TensorSlice, num_rows: int, role: str = SCALES) -> Companion:
    """Returns a companion of factors as a matrix: one or more per row, or one for all rows. Raises CheckpointError for
    another number of rows."""
    shape = (1, 1) if prod(factors.shape) == 1 else factors.shape
    shape = (*shape, 1) if len(shape) == 1 else shape
    if len(shape) != 2 or shape[0] not in (1, num_rows):
        raise CheckpointError(
            f"{factors.file}: {factors.name!r} has shape {factors.shape}; a weight of {num_rows} rows needs one factor "
            "in all, or one or more per row"
        )
    return Companion(role=role, tensor=replace(factors, shape=shape), block_rows=1)


def group_width(num_columns: int, factors: TensorSlice, num_groups: int) -> int:
    """Returns the number of columns per group. Raises CheckpointError if `num_groups` does not divide the columns."""
    if not num_groups or num_columns % num_groups:
        raise CheckpointError(
            f"{factors.file}: {factors.name!r} has {num_groups} groups, which do not divide {num_columns} columns"
        )
    return num_columns // num_groups


def read_relative_error(quantization: Mapping[str, object]) -> float | None:
    """Returns the relative RMS error in a store's config; None if it is missing or invalid."""
    found = quantization.get(RELATIVE_ERROR)
    return float(found) if isinstance(found, int | float) and 0 <= found < inf else None


def part_name(weight: str, part: str) -> str:
    return f"{weight}_{part}"


def pair_parts(
    tensors: Mapping[str, TensorSlice],
    quantization: Mapping[str, object],
    part: str,
    companion: str,
    fit: MakeWeight,
) -> Mapping[str, TensorSlice]:
    """Returns the tensors, with each pair of `X_part` and `X_companion` combined into weight X by `fit`.

    Raises CheckpointError if a companion is missing, or if the config does not name our method: without it the store's
    checksums would not be verified."""
    result, suffix = dict(tensors), part_name("", part)
    for name, tensor in tensors.items():
        weight = name.removesuffix(suffix)
        if weight == name or tensor.dtype not in ("U8", "I8"):
            continue
        partner = result.pop(part_name(weight, companion), None)
        if partner is None:
            raise CheckpointError(f"{tensor.file}: {name!r} lacks its companion {part_name(weight, companion)!r}")
        if quantization.get("quant_method") != METHOD:
            raise CheckpointError(
                f"{tensor.file}: {name!r} was written by `weightstream pack`, but config.json lacks its "
                "quantization_config: use the config.json that pack wrote"
            )
        result[weight] = fit(result.pop(name), partner)
    return result


def mismatch_error(body: TensorSlice, companion: TensorSlice) -> CheckpointError:
    return CheckpointError(
        f"{body.file}: {companion.name!r} ({companion.dtype}, shape {companion.shape}) does not fit {body.name!r} "
        f"(shape {body.shape}): pack the model again"
    )
