"""What a peer's worker answers: its tokens, how long they took, and what the kernel has counted meanwhile."""

import time
from collections.abc import Callable, Mapping

from runtime.stream.host_memory import disk_read_bytes, peak_resident_bytes, reset_peak

from .task import Result


def timed(generate: Callable[[], Mapping[int, list[int]]], *, baseline_bytes: int, batch_size: int | None) -> Result:
    """`generate` answers with the new tokens of each prompt, by its number. `baseline_bytes`: from which peak memory
    counts, what the libraries take."""
    read_before = disk_read_bytes()
    reset_peak()
    begin = time.monotonic()
    tokens = generate()
    seconds = time.monotonic() - begin
    return Result(
        seconds=seconds,
        prefill_seconds=0.0,
        rate=sum(map(len, tokens.values())) / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=baseline_bytes,
        bytes_read=disk_read_bytes() - read_before,
        tokens=[tokens[number] for number in sorted(tokens)],
        batch_size=batch_size,
    )
