"""Measures one way after the other in one process, over weights that are drawn into host memory.

Host memory holds two copies of the weights and no third: accelerate's, pageable as its users have them, and Millrace's,
pinned. torch keeps pinned memory that is freed, so only the first session pins; each draws its weights anew, which
takes seconds and is not timed.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runtime.config import (
    DType,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
)
from runtime.engine.measure.machine import device_name
from runtime.engine.records import PassRecord
from runtime.engine.sequence import Completion
from runtime.stream.device import ComputeDevice
from runtime.stream.host_memory import available_bytes, peak_resident_bytes
from runtime.units import GIB, gib_to_bytes

from ..millrace import prefill_seconds, requests_of
from ..task import Result, prompts
from .config import MODEL_TYPE
from .link import measure_link
from .memory import cap, reserved_peak_bytes, start_anew
from .messages import GpuTask, Machine, Measurement
from .models import DrawnModel, DrawnRuntime, draw_model, size_of
from .peers import PeerModel, accelerated, model_of, partitioned
from .ways import MICRO_BATCHES, Way

PUBLISHED_LAYERS = 32
NUM_COPIES = 2  # of the weights in host memory
HOST_SHARE = 0.8  # of free memory, that they may take
DEVICE_SHARE = 0.7  # of the device, that the weights of the cut model may take
MOST_THREADS = 16  # that draw; more are no faster than memory
CHUNK_TOKENS = 8192  # of prompts per lane and pass: a pass brings all weights, so a lane's prompts go in one


class GpuBench:
    """Writes outlines of its models into `folder`. Not thread-safe."""

    def __init__(self, task: GpuTask, folder: Path, device: ComputeDevice):
        self._task, self._device, gpu = task, device, task.gpu
        self._num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._device_bytes = gib_to_bytes(gpu.device_memory_gib)
        size, free_bytes = size_of(gpu, folder), available_bytes()
        most = gpu.num_layers or PUBLISHED_LAYERS
        num_layers = gpu.num_layers or size.layers_within(HOST_SHARE * free_bytes / NUM_COPIES, most)
        cut_layers = size.layers_within(DEVICE_SHARE * self._device_bytes, num_layers)
        self._models = {is_cut: draw_model(gpu, folder, n) for is_cut, n in ((False, num_layers), (True, cut_layers))}
        self._weight_bytes = size.of_layers(num_layers)
        self._host_gib = (free_bytes - self._weight_bytes) / GIB  # later, what torch keeps pinned looks taken
        self._runtimes: dict[Way, DrawnRuntime] = {}
        self._batch_sizes: dict[Way, int] = {}
        self._whole: PeerModel | None = None

    def machine(self) -> Machine:
        """Measures the link."""
        return Machine(
            device=device_name(self._device),
            link=measure_link(self._device),
            num_layers=self._models[False].num_layers,
            weight_bytes=self._weight_bytes,
        )

    def measure(self, way: Way) -> Measurement:
        """Raises what a peer raises, or MillraceError."""
        start_anew(self._device)
        cap(self._device, self._device_bytes if way.is_peer else None)
        measured = self._peer(way) if way.is_peer else self._millrace(way)
        assert measured.result is not None, "what raises nothing has a result"
        peak_bytes = reserved_peak_bytes(self._device)
        return replace(measured, result=replace(measured.result, peak_device_bytes=peak_bytes))

    def num_layers(self, way: Way) -> int:
        return self._model(way).num_layers

    def _model(self, way: Way) -> DrawnModel:
        return self._models[way.is_cut]

    def _millrace(self, way: Way) -> Measurement:
        """The first pass is run once before."""
        runtime = self._runtime(way)
        requests = requests_of(runtime, self._prompts(way))
        passes: list[PassRecord] = []
        with runtime.confirmed_session(requests) as (plan, session):
            session.probe(requests)
            done = [each for block in plan.blocks for each in session.run(block, requests, passes.append)]
        return Measurement(
            way=way.name,
            num_layers=self.num_layers(way),
            num_sequences=len(requests),
            result=_result(runtime, passes, done),
        )

    def _runtime(self, way: Way) -> DrawnRuntime:
        """Kept. Rates are measured once for all: they only predict here, and decide nothing."""
        if way not in self._runtimes:
            self._runtimes[way] = DrawnRuntime(self._config(way), self._device, self._model(way).weights)
        runtime = self._runtimes[way]
        runtime.rates = next((each.rates for each in self._runtimes.values() if each.rates is not None), None)
        return runtime

    def _config(self, way: Way) -> RuntimeConfig:
        gpu = self._task.gpu
        return RuntimeConfig(
            model=ModelConfig(name=MODEL_TYPE, path=str(self._model(way).path), dtype=DType.bfloat16),
            offload=OffloadConfig(
                tier=way.tier,
                device_memory_gib=gpu.device_memory_gib,
                host_memory_gib=self._host_gib,
                reader_threads=self._num_threads,
            ),
            policy=PolicyConfig(
                kind=PolicyKind.fixed,
                micro_batch_size=-(-gpu.num_prompts // (way.part * MICRO_BATCHES)),
                num_micro_batches=MICRO_BATCHES,
                schedule=way.order,
                attention=way.attention,
                prefill_chunk_tokens=CHUNK_TOKENS,
            ),
            sampling=SamplingConfig(max_new_tokens=gpu.num_new_tokens, ignore_eos=True, temperature=0.0),
            machine=MachineConfig(device=str(self._device.torch_device)),
        )

    def _peer(self, way: Way) -> Measurement:
        peer, ids = (self._held if way.is_cut else self._offloaded)(way), self._prompts(way)
        if way not in self._batch_sizes:
            self._batch_sizes[way] = peer.fitting(ids)
            start_anew(self._device)
        size = self._batch_sizes[way]
        result = peer.measure(ids[:size], self._task.gpu.num_new_tokens)
        if not way.is_cut:
            result = replace(result, bytes_copied=peer.num_forwards * self._weight_bytes)
        return Measurement(way=way.name, num_layers=self.num_layers(way), num_sequences=size, result=result)

    def _held(self, way: Way) -> PeerModel:
        """One tensor after the other, so that host memory holds no third copy."""
        place, model = self._device.torch_device, self._model(way)
        there = {
            name: tensor.to(place)
            for parameter in self._runtime(way).parameters
            for name, tensor in model.weights.tensors([parameter], self._num_threads).items()
        }
        held = model_of(model.path, there)
        held.to(device=place)  # pyright: ignore[reportCallIssue] - its buffers
        return PeerModel(held, self._device)

    def _offloaded(self, way: Way) -> PeerModel:
        """Made once: it is the second copy of the weights."""
        if self._whole is None:
            tensors = self._model(way).weights.tensors(self._runtime(way).parameters, self._num_threads)
            model = model_of(self._model(way).path, tensors)
            self._whole = (partitioned if self._task.is_alone else accelerated)(model, self._device)
        return self._whole

    def _prompts(self, way: Way) -> list[list[int]]:
        vocab_size, gpu = self._runtime(way).model.shape.vocab_size, self._task.gpu
        return prompts(gpu.num_prompts, vocab_size, self._task.prompt_tokens)[: max(1, gpu.num_prompts // way.part)]


def _result(runtime: DrawnRuntime, passes: Sequence[PassRecord], done: Sequence[Completion]) -> Result:
    tokens = {int(completion.request.id): list(completion.token_ids) for completion in done}
    seconds = sum(record.seconds for record in passes)
    return Result(
        seconds=seconds,
        prefill_seconds=prefill_seconds(passes),
        rate=sum(map(len, tokens.values())) / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=runtime.baseline_bytes,
        bytes_read=0,
        tokens=[tokens[number] for number in sorted(tokens)],
        bytes_copied=sum(record.times.bytes_copied_device for record in passes),
        bytes_returned=sum(record.times.bytes_copied_host for record in passes),
    )
