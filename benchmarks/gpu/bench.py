"""Measures variants one after the other in one process, with random weights in host memory.

Host memory has two copies of the weights: accelerate's in pageable memory, and Weightstream's in pinned memory. Pinning
is slow, so only the first variant pins. Later variants reuse this memory and fill it again, which is not timed.
"""

import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jobs.config.typed import build
from runtime.config.settings import (
    DType,
    KVConfig,
    KVTier,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.errors import BudgetError, ConfigError
from runtime.library.api import Runtime
from runtime.measure.machine import device_name
from runtime.plan.cost.rates import MachineRates
from runtime.sequences.sequence import Request
from runtime.stream.device import ComputeDevice
from runtime.stream.host_memory import available_bytes
from runtime.units import GIB, format_bytes, gib_to_bytes

from ..contenders import DEEPSPEED_VARIANT, HOST, VARIANTS, OwnContender, Variant
from ..peers.hugging_face import DeviceModel, build_model, offload_model
from ..task import drop_page_cache, random_prompts
from ..weightstream import make_requests, measure_generation
from .config import MODELS
from .device import limit_memory, measure_link, reserved_peak_bytes, reset_memory
from .progress import ReportingDevice, WorkerProgress
from .random_init import INT4, RandomInitModel, RandomInitRuntime, model_size, unique_parameters, write_model
from .task import GpuMachine, GpuTask, VariantMeasurement, phases_of

log = logging.getLogger(__name__)

NUM_MICRO_BATCHES = 4  # in a block with streamed weights
CHUNK_TOKENS = 8192  # of prompts in a micro-batch and pass: one pass prefills all, as each pass streams all weights
NUM_COPIES = 2  # of the weights in host memory
HOST_SHARE = 0.75  # fraction of free host memory for these copies; the remainder is for read buffers
DEVICE_SHARE = 0.7  # fraction of device memory for the weights of the cut model
DISK_LAYERS, DISK_SHARE = 4, 0.5  # limits of the disk model: layers, and fraction of free disk space
ANY_VOCAB_SIZE = 1000  # lengths of prompts do not depend on it
MAX_THREADS = 16  # that generate random numbers; more would be limited by memory
HOST_STEPS = 8  # a host budget is searched in steps of 1/HOST_STEPS layer


class GpuBench:
    """Measures variants. Writes sparse checkpoints of its models into `folder`. Not thread-safe."""

    def __init__(self, task: GpuTask, folder: Path, device: ComputeDevice, progress: WorkerProgress):
        self._task, self._device, self._progress, gpu = task, device, progress, task.gpu
        self._num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._device_bytes = gib_to_bytes(gpu.device_memory_gib)
        size, free_bytes = model_size(gpu, folder), available_bytes()
        max_layers = gpu.num_layers or MODELS[gpu.model].num_layers
        num_layers = gpu.num_layers or size.layers_within(HOST_SHARE * free_bytes / NUM_COPIES, max_layers)
        cut_layers = size.layers_within(DEVICE_SHARE * self._device_bytes, num_layers)
        progress(f"generating random tiles for {num_layers} layers, {cut_layers} in the device")
        self._whole_model, self._cut_model = (write_model(gpu, folder, n) for n in (num_layers, cut_layers))
        self._int4_model: RandomInitModel | None = None
        disk_bytes = DISK_SHARE * shutil.disk_usage(folder).free
        self._num_disk_layers = size.layers_within(disk_bytes, min(DISK_LAYERS, num_layers))
        self._disk_model: RandomInitModel | None = None
        self._folder, self._layer_bytes = folder, size.layer_bytes
        self._weight_bytes = size.total_bytes(num_layers)
        self._host_gib = (free_bytes - self._weight_bytes) / GIB  # measured before torch keeps pinned memory
        self._runtimes: dict[Variant, Runtime] = {}
        self._rates: MachineRates | None = None  # measured once, as only predictions use them
        self._batch_sizes: dict[Variant, int] = {}
        self._whole: DeviceModel | None = None

    def machine(self) -> GpuMachine:
        """Measures the link. Returns the device and the whole model."""
        self._progress("measuring the link")
        title = MODELS[self._task.gpu.model].title
        if self._task.gpu.shape:
            title += " in other sizes"
        return GpuMachine(
            device=device_name(self._device),
            model=title,
            link=measure_link(self._device),
            num_layers=self._whole_model.num_layers,
            weight_bytes=self._weight_bytes,
        )

    def measure(self, variant: Variant) -> VariantMeasurement:
        """Measures a variant with a limit of device memory, the same for all. Raises an exception of the peer, or
        WeightstreamError."""
        reset_memory(self._device)
        limit_memory(self._device, self._device_bytes)
        measured = self._peer(variant) if variant.is_peer else self._weightstream(variant)
        assert measured.result is not None, "failures raise"
        peak_bytes = reserved_peak_bytes(self._device)
        return replace(measured, result=replace(measured.result, peak_device_bytes=peak_bytes))

    def _model(self, variant: Variant) -> RandomInitModel:
        if variant.is_on_disk:
            return self._write_disk_model()
        if variant.is_int4:
            if self._int4_model is None:
                self._progress("rounding tiles to int4")
                self._int4_model = write_model(self._task.gpu, self._folder, self._whole_model.num_layers, INT4)
            return self._int4_model
        return self._cut_model if variant.is_cut else self._whole_model

    def _write_disk_model(self) -> RandomInitModel:
        """Writes the disk model on first use, and drops it from the page cache."""
        if self._disk_model is None:
            self._progress(f"writing {self._num_disk_layers} layers of {format_bytes(self._layer_bytes)} each to disk")
            self._disk_model = write_model(self._task.gpu, self._folder, self._num_disk_layers)
            self._disk_model.weights.write(self._num_threads)
            drop_page_cache(self._disk_model.path)
        return self._disk_model

    def _weightstream(self, variant: Variant) -> VariantMeasurement:
        runtime = self._runtime(variant)
        requests = make_requests(runtime, self._prompts(variant))
        if variant.entry.tier is Tier.auto:
            self._limit_host_memory(runtime, requests)
        run = measure_generation(runtime, requests, rates=self._rates, is_warmed_up=True, say=self._progress)
        self._rates = run.rates
        return VariantMeasurement(
            variant=variant.name,
            num_layers=self._model(variant).num_layers,
            num_sequences=len(requests),
            is_rounded=variant.is_int4,
            result=run.result,
            phases=phases_of(run.passes),
        )

    def _limit_host_memory(self, runtime: Runtime, requests: Sequence[Request]) -> None:
        """Sets the smallest host budget with which some layers stay in host memory and others are read from disk. Does
        nothing on a CPU, which computes in host memory. Raises BudgetError if there is no such budget."""
        is_searched = runtime.config.offload.host_memory_gib != self._host_gib  # in an earlier round
        if not self._device.is_accelerator or is_searched:
            return
        step_bytes = self._layer_bytes / HOST_STEPS
        walk = runtime.plan(requests, rates=self._rates).placement.walk  # which layers are streamed, and from where
        for number in range(1, 1 + math.ceil(self._host_gib * GIB / step_bytes)):
            offload = replace(runtime.config.offload, host_memory_gib=number * step_bytes / GIB)
            runtime.config = replace(runtime.config, offload=offload)
            try:
                walk = runtime.plan(requests, rates=self._rates).placement.walk
            except BudgetError:
                continue
            if walk.in_host:
                break
        from_disk = set(walk.streamed) - walk.in_host
        if not (walk.in_host and from_disk):
            raise BudgetError(f"no host budget keeps some of the {self._num_disk_layers} layers and streams the others")
        self._progress(f"{len(walk.in_host)} layers stay in host memory, {len(from_disk)} are read from disk")

    def _runtime(self, variant: Variant) -> Runtime:
        if variant not in self._runtimes:
            config, model = self._config(variant), self._model(variant)
            weights = None if variant.is_on_disk else model.weights
            count = partial(self._progress.count_bytes, "generating weights:")
            self._runtimes[variant] = RandomInitRuntime(config, self._device, weights, count)
        return self._runtimes[variant]

    def _config(self, variant: Variant) -> RuntimeConfig:
        gpu, ours = self._task.gpu, variant.entry if isinstance(variant.entry, OwnContender) else HOST
        return RuntimeConfig(
            model=ModelConfig(name=gpu.model, path=str(self._model(variant).path), dtype=DType.bfloat16),
            offload=OffloadConfig(
                tier=variant.entry.tier,
                device_memory_gib=gpu.device_memory_gib,
                host_memory_gib=self._host_gib,
                reader_threads=self._num_threads,
                resident_layers=0 if variant.is_on_disk or variant.is_int4 else None,
            ),
            kv=KVConfig(tier=ours.kv, device_fraction=0.0 if ours.kv is KVTier.cpu else None),
            policy=PolicyConfig(
                kind=PolicyKind.fixed,
                micro_batch_size=-(-gpu.num_prompts // (variant.prompt_divisor * _num_lanes(variant))),
                num_micro_batches=_num_lanes(variant),
                schedule=ours.schedule,
                attention=ours.attention,
                admission=ours.admission,
                prefill_chunk_tokens=self._chunk_tokens(variant),
            ),
            sampling=SamplingConfig(max_new_tokens=gpu.num_new_tokens, ignore_eos=True, temperature=0.0),
            machine=MachineConfig(device=str(self._device.torch_device)),
        )

    def _chunk_tokens(self, variant: Variant) -> int:
        if variant.num_prefill_chunks == 1:
            return CHUNK_TOKENS
        gpu = self._task.gpu
        lengths = [len(ids) for ids in random_prompts(gpu.num_prompts, ANY_VOCAB_SIZE, self._task.prompt_tokens)]
        return -(-sum(lengths) // (variant.prompt_divisor * _num_lanes(variant) * variant.num_prefill_chunks))

    def _peer(self, variant: Variant) -> VariantMeasurement:
        peer, ids = (self._in_device if variant.is_cut else self._offloaded)(variant), self._prompts(variant)
        if variant not in self._batch_sizes:
            self._progress("searching the batch size, the largest first")
            self._batch_sizes[variant] = peer.largest_batch(ids, lambda: reset_memory(self._device))
            reset_memory(self._device)
        size = self._batch_sizes[variant]
        self._progress(f"measured run of {size} sequences")
        result = peer.measure(ids[:size], self._task.gpu.num_new_tokens)
        if not variant.is_cut:
            result = replace(result, bytes_copied=peer.num_forwards * self._weight_bytes)
        return VariantMeasurement(
            variant=variant.name, num_layers=self._model(variant).num_layers, num_sequences=size, result=result
        )

    def _in_device(self, variant: Variant) -> DeviceModel:
        """Builds the model in device memory tensor by tensor, so that host memory holds no third copy."""
        device, model = self._device.torch_device, self._model(variant)
        self._progress(f"generating {model.num_layers} layers of {format_bytes(self._layer_bytes)} in the device")
        tensors = {
            name: tensor.to(device)
            for parameter in unique_parameters(self._runtime(variant))
            for name, tensor in model.weights.tensors([parameter], self._num_threads).items()
        }
        module = build_model(model.path, tensors)
        module.to(device=device)  # pyright: ignore[reportCallIssue] - its buffers
        return DeviceModel(module, self._device)

    def _offloaded(self, variant: Variant) -> DeviceModel:
        """Returns the peer's model, built once, because it has the second copy of the weights in host memory."""
        if self._whole is None:
            self._progress(f"generating the peer's copy of {format_bytes(self._weight_bytes)}")
            tensors = self._model(variant).weights.tensors(unique_parameters(self._runtime(variant)), self._num_threads)
            model = build_model(self._model(variant).path, tensors)
            if self._task.is_alone:
                from ..peers.zero_inference import partition_model  # imports deepspeed

                self._whole = partition_model(model, self._device)
            else:
                self._whole = offload_model(model, self._device)
        return self._whole

    def _prompts(self, variant: Variant) -> list[list[int]]:
        vocab_size, gpu = self._runtime(variant).model.shape.vocab_size, self._task.gpu
        return random_prompts(gpu.num_prompts, vocab_size, self._task.prompt_tokens)[
            : max(1, gpu.num_prompts // variant.prompt_divisor)
        ]


def _num_lanes(variant: Variant) -> int:
    """The micro-batches of a block. The cut model has one: it streams nothing, and kernel launches for each micro-batch
    are most of a decode pass."""
    return 1 if variant.is_cut else NUM_MICRO_BATCHES


def measurements(
    task: GpuTask, device: ComputeDevice, progress: WorkerProgress
) -> Iterator[GpuMachine | VariantMeasurement]:
    """Yields the machine, then the measurements of each round.

    A measurement is not started if its expected time exceeds the time left. The expected time is that of the variant's
    last round. In the first round, it is the longest time so far of a variant of the same kind: peers, or variants of
    Weightstream. A variant that fails, or has no time for its first round, is reported once.
    """
    end = (time.monotonic() if task.start_time is None else task.start_time) + task.seconds
    limit = f"gpu.minutes={task.gpu.minutes:g}"
    with tempfile.TemporaryDirectory() as folder:
        bench = GpuBench(task, Path(folder), device, progress)
        yield bench.machine()
        pending = [DEEPSPEED_VARIANT] if task.is_alone else list(VARIANTS)
        durations: dict[Variant, float] = {}
        for number in range(1, task.rounds + 1):
            for variant in list(pending):
                begin = time.monotonic()
                similar = [seconds for each, seconds in durations.items() if each.is_peer == variant.is_peer]
                if begin + durations.get(variant, max(similar or durations.values(), default=0.0)) >= end:
                    if variant not in durations:
                        pending.remove(variant)
                        yield VariantMeasurement(variant=variant.name, refusal=f"no time left of {limit}")
                    continue
                progress.begin_variant(f"{variant.name}, round {number}")
                measurement = _measure_safely(bench, variant)
                if measurement.refusal:
                    pending.remove(variant)
                else:
                    durations[variant] = time.monotonic() - begin
                yield measurement


def _measure_safely(bench: GpuBench, variant: Variant) -> VariantMeasurement:
    """Measures a variant. Any exception becomes its refusal, so that later variants still run: the machine may be lent
    for these minutes only."""
    if variant.missing:
        return VariantMeasurement(variant=variant.name, refusal=f"{', '.join(variant.missing)} is not installed")
    try:
        return bench.measure(variant)
    except Exception as error:
        log.exception("%s", variant.name)
        return VariantMeasurement(variant=variant.name, refusal=f"{type(error).__name__}: {error}")


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`). Raises ConfigError if there is no such device."""
    task = build(GpuTask, question)
    progress = WorkerProgress(time.monotonic() if task.start_time is None else task.start_time)
    progress(f"imported torch {torch.__version__}, opening {task.gpu.device}")
    if task.gpu.device != "cpu" and not torch.accelerator.is_available():
        raise ConfigError(f"gpu.device={task.gpu.device}: torch {torch.__version__} finds no accelerator")
    yield from map(asdict, measurements(task, ReportingDevice(task.gpu.device, progress), progress))
