"""The arguments and the result of a measurement, and functions that all contenders use."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import numpy as np

from runtime.config.settings import Attention, Order, PolicyKind
from runtime.stream.host_memory import disk_read_bytes, peak_resident_bytes, reset_peak

from .contenders import CONTENDERS, Contender, Entry

SECONDS_BETWEEN_DROPS = 0.5  # of the page cache; shorter than a decode step of any peer


@dataclass(frozen=True, kw_only=True)
class BenchmarkTask:
    """The arguments of one measurement.

    - `path`: the checkpoint
    - `batch_size`: of a peer; None: the peer has none, or it is not searched yet
    - `num_kv_slots`: the number of sequences whose KV counts in the budget; None: those of a block
    - `host_memory_gib`: the budget, instead of the one from `weight_share`
    - `prompts_file`: JSON with a list of token ids for each prompt; None: random prompts
    - `is_check`: only plans, to check that the budget suffices
    """

    contender: str
    path: str
    num_prompts: int
    prompt_tokens: int
    num_new_tokens: int
    ignore_eos: bool
    batch_size: int | None
    micro_batch_size: int | None
    num_micro_batches: int
    weight_share: float
    num_threads: int
    policy: str = PolicyKind.fixed.value
    schedule: str = Order.zigzag.value
    attention: str = Attention.device.value
    num_kv_slots: int | None = None
    host_memory_gib: float | None = None
    limit_minutes: float | None = None
    prompts_file: str | None = None
    is_check: bool = False

    @property
    def entry(self) -> Entry:
        return CONTENDERS[Contender(self.contender)]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one measurement. `rate`: tokens per second; bytes per second for baselines that only read, which
    have no `tokens`. `baseline_bytes`: memory of the libraries, subtracted from `peak_bytes` in tables. `tokens`: the
    new tokens of each prompt."""

    seconds: float
    prefill_seconds: float
    rate: float
    peak_bytes: int
    baseline_bytes: int
    bytes_read: int
    tokens: list[list[int]]
    predicted_prefill_seconds: float = 0.0
    predicted_decode_seconds: float = 0.0
    policy: str = ""  # the searched policy
    num_passes: int = 0  # of Weightstream
    batch_size: int | None = None  # of peers with a batch size
    peak_device_bytes: int = 0
    bytes_copied: int = 0  # to the device
    bytes_returned: int = 0  # from the device
    num_prompt_tokens: int = 0  # computed by Weightstream
    num_block_rows: int = 0  # sequences of Weightstream's largest block


Measure = Callable[[BenchmarkTask], Result]
Say = Callable[[str], object]  # writes a line of progress


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """The results of a suite. `rounds`: a result for each round, by contender. `peers`: contenders other than
    Weightstream. `draw`: writes the suite's picture into a directory. `is_interrupted`: measurements are missing."""

    table: str
    rounds: Mapping[str, Sequence[Result]]
    peers: Sequence[str] = ()
    draw: Callable[[Path], None] | None = None
    is_interrupted: bool = False


def measure_peer(
    generate: Callable[[], Mapping[int, list[int]]], *, baseline_bytes: int, batch_size: int | None
) -> Result:
    """Times a peer's `generate`, which returns the new tokens by prompt number. Memory and bytes read are the kernel's
    counters for this process."""
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


def task_prompts(task: BenchmarkTask, vocab_size: int) -> list[list[int]]:
    if task.prompts_file is None:
        return random_prompts(task.num_prompts, vocab_size, task.prompt_tokens)
    return json.loads(Path(task.prompts_file).read_text())[: task.num_prompts]


def random_prompts(num_prompts: int, vocab_size: int, median_tokens: int) -> list[list[int]]:
    """Random token ids. The lengths are log-normal, 16 to 256, and the same for every vocabulary."""
    random = np.random.default_rng(77)
    lengths = np.clip(np.round(np.exp(random.normal(np.log(median_tokens), 0.7, num_prompts))), 16, 256).astype(int)
    return [random.integers(10, vocab_size - 10, size=int(length)).tolist() for length in lengths]


def batches_by_length(prompts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Prompt numbers in batches of similar length, the longest first."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def drop_page_cache(path: Path) -> None:
    """Drops a file, or all files of a directory, from the page cache."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fdatasync(descriptor)  # DONTNEED skips dirty pages
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextmanager
def drop_page_cache_repeatedly(directory: Path) -> Iterator[None]:
    """Keeps dropping the files of `directory` from the page cache, as if the model were larger than memory."""
    is_done = Event()

    def drop() -> None:
        while not is_done.wait(SECONDS_BETWEEN_DROPS):
            drop_page_cache(directory)

    drop_page_cache(directory)
    cleaner = Thread(target=drop)
    cleaner.start()
    try:
        yield
    finally:
        is_done.set()
        cleaner.join()  # the directory may be deleted next
