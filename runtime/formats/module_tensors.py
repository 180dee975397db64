"""How tensors of a checkpoint become weights: those that stand for the weight of one module in what others have
quantised, and `X_FORMAT` beside its companion in a store that `weightstream pack` wrote. What a config says of
quantisation that is not done here is refused or named, never silently left out."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, prod

from ..errors import CheckpointError
from ..plan.shape.shapes import Companion, TensorSlice
from ..store.checkpoint import read_integers
from .scaled_rows import SCALES

log = logging.getLogger(__name__)

MOST_SHOWN = 400  # characters of what a config says
UNQUANTISED = "the unquantised checkpoint; most models have one"
ZEROS, GROUPS = "zeros", "groups"  # roles: zero points, and the group of each column
FLOATS = ("F16", "BF16", "F32")
METHOD = "weightstream"  # `quant_method` in the store's config.json
RELATIVE_ERROR = "relative_rms_error"  # beside it: of all weights that were rounded
MakeWeight = Callable[[TensorSlice, TensorSlice], TensorSlice]  # bytes and companion -> the weight


def unsupported_error(what: str, readable: str) -> CheckpointError:
    """Returns the error for a variant that cannot be read, with what can be in its place."""
    what = what if len(what) <= MOST_SHOWN else f"{what[:MOST_SHOWN]}..."
    return CheckpointError(f"model.path: {what}, which cannot be read. Can be: {readable}, and {UNQUANTISED}")


def warn_activations(how: str) -> None:
    """Logs that inputs of products are not rounded as the config has it."""
    log.warning(
        "model.path: its config has activations quantised (%s); here they are not: the output is that of its "
        "dequantised weights",
        how,
    )


def warn_kv_cache() -> None:
    log.warning("model.path: its config has keys and values quantised; here they are kept in the compute dtype")


def get_mapping(values: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Returns the object under a key of the config, {} for anything else."""
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def get_integer(values: Mapping[str, object], key: str, default: int) -> int:
    """Raises CheckpointError for a value that is none."""
    found = values.get(key)
    if found is None:
        return default
    if type(found) is not int:
        raise CheckpointError(f"config.json: quantization_config.{key} is {found!r:.40}; a whole number is wanted")
    return found


@dataclass(frozen=True)
class ModuleTensors:
    """A module's tensors by their own names behind its `path`, which ends in a dot."""

    path: str
    tensors: Mapping[str, TensorSlice]  # the whole checkpoint's

    def find(self, leaf: str) -> TensorSlice | None:
        return self.tensors.get(self.path + leaf)

    def require(self, leaf: str, *dtypes: str) -> TensorSlice:
        """Raises CheckpointError where it is missing, or none of these dtypes."""
        found = self.find(leaf)
        if found is not None and found.dtype not in dtypes:
            raise CheckpointError(f"{found.file}: {found.name!r} is {found.dtype}; {' or '.join(dtypes)} is wanted")
        if found is None:
            file = next(tensor.file for name, tensor in self.tensors.items() if name.startswith(self.path))
            raise CheckpointError(f"{file}: {self.path + leaf!r} is missing, without which its module cannot be read")
        return found


def modules_with(tensors: Mapping[str, TensorSlice], leaf: str) -> Iterator[ModuleTensors]:
    """Yields the modules that have a tensor of this name."""
    for name in tensors:
        path = name.removesuffix(leaf)
        if path != name and (not path or path.endswith(".")):
            yield ModuleTensors(path, tensors)


def replace_tensors(
    tensors: Mapping[str, TensorSlice], weights: Mapping[str, TensorSlice], leaves: Collection[str]
) -> Mapping[str, TensorSlice]:
    """Returns the tensors with a `weight` in each of these modules, by path, in the place of its tensors of these
    names."""
    result = dict(tensors)
    for path, weight in weights.items():
        for leaf in leaves:
            result.pop(path + leaf, None)
        result[f"{path}weight"] = weight
    return result


def require_matrix(tensor: TensorSlice) -> tuple[int, int]:
    """Returns its shape. Raises CheckpointError for any other than a matrix."""
    if len(tensor.shape) != 2:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name!r} has shape {tensor.shape}; of quantised weights in this format only "
            "matrices can be read"
        )
    return tensor.shape[0], tensor.shape[1]


def require_shape(tensor: TensorSlice, expected: tuple[int, ...], why: str) -> TensorSlice:
    """Returns the tensor. Raises CheckpointError for another shape."""
    if tensor.shape != expected:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} has shape {tensor.shape}; {why} needs {expected}")
    return tensor


def column_groups(groups: TensorSlice, num_columns: int, num_groups: int) -> Companion:
    """Reads which group each column is in. Raises CheckpointError for groups that are not there."""
    require_shape(groups, (num_columns,), "its module")
    found = read_integers(groups)
    if min(found, default=0) < 0 or max(found, default=0) >= num_groups:
        raise CheckpointError(
            f"{groups.file}: {groups.name!r} names groups {min(found)} to {max(found)}; there are {num_groups}"
        )
    return Companion(role=GROUPS, tensor=groups)


def row_factors(factors: TensorSlice, num_rows: int, role: str = SCALES) -> Companion:
    """Returns factors of each row, one or several, or of all rows, as a matrix. Raises CheckpointError for factors of
    another number of rows."""
    shape = (1, 1) if prod(factors.shape) == 1 else factors.shape
    shape = (*shape, 1) if len(shape) == 1 else shape
    if len(shape) != 2 or shape[0] not in (1, num_rows):
        raise CheckpointError(
            f"{factors.file}: {factors.name!r} has shape {factors.shape}; a weight of {num_rows} rows needs one for "
            "all, or one or more for each row"
        )
    return Companion(role=role, tensor=replace(factors, shape=shape), block_rows=1)


def group_width(num_columns: int, factors: TensorSlice, num_groups: int) -> int:
    """Returns how many columns share a factor, of so many equal groups. Raises CheckpointError where these do not
    divide the columns."""
    if not num_groups or num_columns % num_groups:
        raise CheckpointError(
            f"{factors.file}: {factors.name!r} has {num_groups} groups, which do not divide {num_columns} columns"
        )
    return num_columns // num_groups


def read_relative_error(quantization: Mapping[str, object]) -> float | None:
    """What a store's config says of how far its weights are off; None where it says nothing, or what cannot be."""
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
    """Returns the tensors, each weight that lies in `part` and `companion` under its own name. Raises CheckpointError
    for one that lacks its companion, and where the config does not say that this is a store of ours: nothing would be
    compared with its sums."""
    result, suffix = dict(tensors), part_name("", part)
    for name, tensor in tensors.items():
        weight = name.removesuffix(suffix)
        if weight == name or tensor.dtype not in ("U8", "I8"):
            continue
        beside = result.pop(part_name(weight, companion), None)
        if beside is None:
            raise CheckpointError(f"{tensor.file}: {name!r} lacks {part_name(weight, companion)!r} beside it")
        if quantization.get("quant_method") != METHOD:
            raise CheckpointError(
                f"{tensor.file}: {name!r} is of a store that `weightstream pack` wrote, but config.json lacks its "
                "quantization_config: take the config.json that was written beside it"
            )
        result[weight] = fit(result.pop(name), beside)
    return result


def mismatch_error(body: TensorSlice, beside: TensorSlice) -> CheckpointError:
    return CheckpointError(
        f"{body.file}: {beside.name!r}, {beside.dtype} of shape {beside.shape}, does not fit {body.name!r} of shape "
        f"{body.shape}: pack the model anew"
    )
