"""What the disk gives without our machinery."""

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from threading import local

from runtime.config import OffloadConfig
from runtime.plan.shape.extents import Extent
from runtime.units import MIB


def read_plainly(extents: Sequence[Extent], offload: OffloadConfig, num_times: int) -> tuple[float, int]:
    """Seconds and bytes of threads that each read the next chunk into a buffer of their own."""
    chunk = offload.read_chunk_mib * MIB
    files = {e.file: os.open(e.file, os.O_RDONLY | os.O_DIRECT) for e in extents}
    jobs = [
        (files[e.file], e.offset + at, min(chunk, e.num_bytes - at))
        for e in extents
        for at in range(0, e.num_bytes, chunk)
    ]
    mine = local()

    def read(job: tuple[int, int, int]) -> int:
        if not hasattr(mine, "buffer"):
            mine.buffer = mmap.mmap(-1, chunk)
        return os.preadv(job[0], [memoryview(mine.buffer)[: job[2]]], job[1])

    begin = time.monotonic()
    with ThreadPoolExecutor(offload.reader_threads) as pool:
        num_bytes = sum(pool.map(read, islice(cycle(jobs), num_times * len(jobs))))
    seconds = time.monotonic() - begin
    for descriptor in files.values():
        os.close(descriptor)
    return seconds, num_bytes
