"""What a device's libraries take of its memory beside all that a plan counts. Allowances, stated once and not measured:
the context itself is there before free memory is asked for."""

from ...units import MIB
from .ledger import Entry

KERNELS_BYTES = 256 * MIB  # of torch and its libraries, loaded at their first call; torch's allocator does not see them
WORKSPACE_BYTES = 64 * MIB  # of cuBLAS and cuBLASLt; torch gives each 32 MiB on Hopper, less elsewhere
BLOCKS_BYTES = 64 * MIB  # that torch's allocator holds beyond its tensors: it maps 2 to 20 MiB at a time
LIBRARY_BYTES = KERNELS_BYTES + WORKSPACE_BYTES + BLOCKS_BYTES


def library_entry(num_bytes: int) -> Entry:
    """Of one device or several."""
    parts = " + ".join(
        f"{what} {part // MIB} MiB"
        for what, part in (
            ("kernels", KERNELS_BYTES),
            ("BLAS workspaces", WORKSPACE_BYTES),
            ("allocator's blocks", BLOCKS_BYTES),
        )
    )
    count = num_bytes // LIBRARY_BYTES
    return Entry(name="libraries", num_bytes=num_bytes, equation=parts if count == 1 else f"{count} x ({parts})")
