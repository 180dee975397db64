"""Measures this machine for `jobs.measure`: the hardware, and the overhead of the engine with a tiny model.

A lane is a micro-batch, a stage is a part of the forward such as a layer, and a turn is the computation of one lane in
one stage. A probe is a function that measures one number.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median

import torch
from tqdm import tqdm

from runtime.config.profiles import MeasureConfig, MeasuredRates
from runtime.config.settings import (
    RANDOM,
    MachineConfig,
    ModelConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
)
from runtime.engine.records import PassRecord, Phase
from runtime.engine.session import Session
from runtime.library.api import Runtime
from runtime.measure.bandwidth import DEVICE_COPY, HOST_COPY, LINK_IN, LINK_OUT, SUSTAINED
from runtime.measure.linear import fastest_backends
from runtime.measure.machine import device_name, dtype_rates, machine_probes
from runtime.measure.machine_cache import current_host
from runtime.measure.timing import Probe, measure
from runtime.planning.budgets import FREE_SHARE, usable_host_bytes
from runtime.requests.prompts import Request
from runtime.stream.device import ComputeDevice
from runtime.units import GIB

from .report import Measurement

TURN, PASS = "a turn: one lane in one stage", "a pass, without its turns"
NUM_LANES, NUM_NEW_TOKENS = 8, 6
Advance = Callable[[str, int], object]  # called after each probe, with its name and the total number of steps


@torch.inference_mode()
def measure_machine(machine: MachineConfig, config: MeasureConfig, advance: Advance) -> Measurement:
    """Measures all rates. Raises ConfigError if the device is missing."""
    begin = time.monotonic()
    device = ComputeDevice(machine.device)
    if machine.num_threads is not None:
        torch.set_num_threads(machine.num_threads)
    host_gib = usable_host_bytes(is_pinned=device.is_accelerator) / GIB
    device_gib = device.free_bytes() * FREE_SHARE / GIB if device.is_accelerator else None
    with machine_probes(config, device) as (hardware, by_dtype, notes), turn_probes(machine, device) as turns:
        probes = [*hardware, *turns]
        total = len(probes) * (config.num_rounds + 1)
        measured = measure(
            probes, num_rounds=config.num_rounds, seconds=config.seconds, advance=lambda name: advance(name, total)
        )
    figures = measured.figures
    dtypes = {dtype: dtype_rates(dtype, names, config.gemm_rows, figures, device) for dtype, names in by_dtype.items()}
    link_in, link_out = (figures[name].value if name in figures else None for name in (LINK_IN, LINK_OUT))
    rates = MeasuredRates(
        host_memory_gib=host_gib,
        device_memory_gib=device_gib,
        disk_gb_per_second=figures[SUSTAINED].value,
        memory_gb_per_second=figures[DEVICE_COPY if device.is_accelerator else HOST_COPY].value,
        turn_seconds=figures[TURN].value,
        pass_seconds=figures[PASS].value,
        gemm_rows=list(config.gemm_rows),
        link_in_gb_per_second=link_in,
        link_out_gb_per_second=link_out,
        **dtypes,
    )
    host = current_host(device_name(device), torch.get_num_threads())
    backends = None if device.is_accelerator else fastest_backends(config.gemm_rows, figures)
    if measured.num_rounds < config.num_rounds:
        notes.append(
            f"only {measured.num_rounds} of measure.num_rounds={config.num_rounds}: a round takes "
            f"{measured.round_seconds:.1f} s, and measure.seconds={config.seconds:g}"
        )
    return Measurement(
        host=host, rates=rates, figures=figures, products=backends, seconds=time.monotonic() - begin, notes=notes
    )


@contextmanager
def turn_probes(machine: MachineConfig, device: ComputeDevice) -> Iterator[list[Probe]]:
    """Yields two probes, from decode passes (forwards) of a tiny random model: the time of a turn, and the time of a
    pass without its turns. Turns in layers with experts take longer."""
    config = RuntimeConfig(
        model=ModelConfig(name=RANDOM),
        machine=replace(machine, sheet=None, rates=None),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=1, num_micro_batches=NUM_LANES),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
    )
    runtime = Runtime(config, device=device)
    runtime.wait_for_kernels()
    lanes = [runtime.request(str(index), [5, 6, 7]) for index in range(NUM_LANES)]
    requests = [request for request in lanes if isinstance(request, Request)]
    num_stages = len(runtime.model.shape.stages)
    with ExitStack() as stack:
        one_lane = _TimedPasses(stack, runtime, requests[:1])
        all_lanes = _TimedPasses(stack, runtime, requests)

        # (time with all lanes - time with one lane) / (number of stages x number of additional lanes)
        def turn() -> float:
            return max(0.0, (all_lanes.seconds() - one_lane.seconds()) / (num_stages * (NUM_LANES - 1)))

        yield [
            Probe(name=TURN, unit="s", read=turn),
            Probe(name=PASS, unit="s", read=lambda: max(0.0, one_lane.seconds() - num_stages * turn())),
        ]


class _TimedPasses:
    """Runs decode passes in a session, which `stack` closes."""

    def __init__(self, stack: ExitStack, runtime: Runtime, requests: Sequence[Request]):
        self._plan, self._session = stack.enter_context(runtime.open_with_backoff(requests))
        self._requests = requests

    def seconds(self) -> float:
        """Runs the requests. Returns the median time of a decode pass."""
        records: list[PassRecord] = []
        session: Session = self._session
        session.run(self._plan.blocks[0], self._requests, records.append)
        return median(record.seconds for record in records if record.phase is Phase.decode)


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Yields the `advance` of a progress bar on stderr. Shows nothing if stderr is not a terminal."""
    with tqdm(unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:

        def advance(name: str, total: int) -> None:
            bar.total = total
            bar.set_description(name, refresh=False)
            bar.update()

        yield advance
