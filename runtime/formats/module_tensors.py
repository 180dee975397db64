"""Helpers to read quantized checkpoints: they find the tensors of one weight, check them, and attach the companions
(scales, zero points) to it.

Published checkpoints have several tensors per module, such as `qweight` and `scales`. `weightstream pack` writes two
tensors for a weight X: `X_FORMAT`, such as `X_window4`, and its companion, such as `X_escapes`. Unsupported
quantization settings raise an error or log a warning.
"""

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

MAX_CHARACTERS = 400  # longest text about a config value in a message
UNQUANTIZED = "the unquantized checkpoint; most models have one"
ZEROS, GROUPS = "zeros", "groups"  # companion roles: zero points; the group number of each column
METHOD = "weightstream"  # `quant_method` in config.json of a checkpoint that `weightstream pack` wrote
RELATIVE_ERROR = "relative_rms_error"  # key next to `quant_method`: rounding error over all rounded weights
MakeWeight = Callable[[TensorSlice, TensorSlice], TensorSlice]  # (codes, companion) -> weight with its companion


def unsupported_error(problem: str, readable: str) -> CheckpointError:
    """Returns an error that names the unsupported `problem`, and the supported variants (`readable`)."""
    problem = problem if len(problem) <= MAX_CHARACTERS else f"{problem[:MAX_CHARACTERS]}..."
    return CheckpointError(f"model.path: {problem}, which is not supported. Supported: {readable}, and {UNQUANTIZED}")


def warn_activations(scheme: str) -> None:
    """Logs a warning that the config's quantization of activations (`scheme`) is ignored."""
    log.warning("model.path: its config quantizes activations (%s): ignored, only weights are quantized here", scheme)


def warn_kv_cache() -> None:
    log.warning("model.path: its config quantizes keys and values: ignored; to quantize them here, set kv.dtype")


def get_mapping(values: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Returns the mapping under a key of the config; {} if it is missing or not a mapping."""
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def get_integer(values: Mapping[str, object], key: str, default: int) -> int:
    """Returns the integer under a key, or `default` if it is missing. Raises CheckpointError for another type."""
    value = values.get(key)
    if value is None:
        return default
    if type(value) is not int:
        raise CheckpointError(f"config.json: quantization_config.{key} is {value!r:.40}; must be an integer")
    return value


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of one module, such as `model.layers.0.mlp.up_proj.`. Their last names (`weight`) are leaves."""

    path: str  # prefix of the names, including the last dot
    tensors: Mapping[str, TensorSlice]  # all tensors of the checkpoint, by name

    def find(self, leaf: str) -> TensorSlice | None:
        return self.tensors.get(self.path + leaf)

    def require(self, leaf: str, *dtypes: str) -> TensorSlice:
        """Returns the tensor `leaf`. Raises CheckpointError if it is missing or its dtype is not one of `dtypes`."""
        tensor = self.find(leaf)
        if tensor is None:
            file = next(tensor.file for name, tensor in self.tensors.items() if name.startswith(self.path))
            raise CheckpointError(f"{file}: {self.path + leaf!r} is missing; its module cannot be read without it")
        if tensor.dtype not in dtypes:
            raise CheckpointError(f"{tensor.file}: {tensor.name!r} is {tensor.dtype}; must be {' or '.join(dtypes)}")
        return tensor


def modules_with(tensors: Mapping[str, TensorSlice], leaf: str) -> Iterator[ModuleTensors]:
    """Yields each module that has a tensor `leaf`."""
    for name in tensors:
        path = name.removesuffix(leaf)
        if path != name and (not path or path.endswith(".")):
            yield ModuleTensors(path, tensors)


def replace_tensors(
    tensors: Mapping[str, TensorSlice], weights: Mapping[str, TensorSlice], leaves: Collection[str]
) -> Mapping[str, TensorSlice]:
    """Returns the checkpoint's tensors after removing `leaves` from each module of `weights` (module path -> weight)
    and storing that module's weight under the name `weight`."""
    result = dict(tensors)
    for path, weight in weights.items():
        for leaf in leaves:
            result.pop(path + leaf, None)
        result[f"{path}weight"] = weight
    return result


def require_matrix(tensor: TensorSlice) -> tuple[int, int]:
    """Returns the shape of a matrix. Raises CheckpointError if the tensor has not two dimensions."""
    if len(tensor.shape) != 2:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name!r} has shape {tensor.shape}; weights in this format must be matrices"
        )
    return tensor.shape[0], tensor.shape[1]


def require_shape(tensor: TensorSlice, expected: tuple[int, ...], owner: str) -> TensorSlice:
    """Returns the tensor. Raises CheckpointError if its shape is not `expected`. `owner`: the weight or module that
    requires this shape, for the message."""
    if tensor.shape != expected:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} has shape {tensor.shape}; {owner} needs {expected}")
    return tensor


def column_groups(groups: TensorSlice, num_columns: int, num_groups: int) -> Companion:
    """Returns `groups`, the group number of each column, as a companion. Reads it, and raises CheckpointError if a
    number is out of range."""
    require_shape(groups, (num_columns,), "its module")
    numbers = read_integers(groups)
    if min(numbers, default=0) < 0 or max(numbers, default=0) >= num_groups:
        raise CheckpointError(
            f"{groups.file}: {groups.name!r} has groups {min(numbers)} to {max(numbers)}; must be 0 to {num_groups - 1}"
        )
    return Companion(role=GROUPS, tensor=groups)


def row_factors(factors: TensorSlice, num_rows: int, role: str = SCALES) -> Companion:
    """Returns `factors` (scales, or zero points) as a companion of shape (num_rows, factors per row), or (1, factors
    per row) if all rows share them. Raises CheckpointError for other shapes."""
    shape = (1, 1) if prod(factors.shape) == 1 else factors.shape
    shape = (*shape, 1) if len(shape) == 1 else shape
    if len(shape) != 2 or shape[0] not in (1, num_rows):
        raise CheckpointError(
            f"{factors.file}: {factors.name!r} has shape {factors.shape}; expected one factor, or one or more for each "
            f"of {num_rows} rows"
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
    """Returns the rounding error that `weightstream pack` wrote into the config; None if it is missing or invalid."""
    error = quantization.get(RELATIVE_ERROR)
    return float(error) if isinstance(error, int | float) and 0 <= error < inf else None


def part_name(weight: str, part: str) -> str:
    return f"{weight}_{part}"


def pair_parts(
    tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object], part: str, companion: str, make: MakeWeight
) -> Mapping[str, TensorSlice]:
    """Returns the tensors of a checkpoint that `weightstream pack` wrote. Each pair of `X_{part}` (codes, U8 or I8) and
    `X_{companion}` is replaced by weight X, which `make` builds from them.

    Raises CheckpointError if a companion is missing, or if `quant_method` is not `weightstream`: checksums are verified
    only for that method."""
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
        result[weight] = make(result.pop(name), partner)
    return result


def mismatch_error(body: TensorSlice, companion: TensorSlice) -> CheckpointError:
    """Returns the error for a companion whose shape or dtype does not match the codes in `body`."""
    return CheckpointError(
        f"{body.file}: {companion.name!r} ({companion.dtype}, shape {companion.shape}) does not fit {body.name!r} "
        f"(shape {body.shape}): pack the model again"
    )
