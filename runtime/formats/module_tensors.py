"""The tensors that stand for the weight of one module in a checkpoint that others have quantised."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ..errors import CheckpointError
from ..plan.shape.shapes import Companion, TensorSlice
from ..store.checkpoint import read_integers
from .scaled_rows import SCALES

ZEROS, GROUPS = "zeros", "groups"  # roles: zero points, and the group of each column
FLOATS = ("F16", "BF16", "F32")


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


def with_weights(
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


def groups_of_columns(groups: TensorSlice, num_columns: int, num_groups: int) -> Companion:
    """Reads which group each column is in. Raises CheckpointError for groups that are not there."""
    require_shape(groups, (num_columns,), "its module")
    found = read_integers(groups)
    if min(found, default=0) < 0 or max(found, default=0) >= num_groups:
        raise CheckpointError(
            f"{groups.file}: {groups.name!r} names groups {min(found)} to {max(found)}; there are {num_groups}"
        )
    return Companion(role=GROUPS, tensor=groups)


def factors_of_rows(factors: TensorSlice, num_rows: int, role: str = SCALES) -> Companion:
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
