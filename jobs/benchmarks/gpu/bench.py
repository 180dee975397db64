"""Measures one way after the other in one process, over weights that are drawn into host memory.

Host memory holds two copies of the weights and no third: accelerate's, pageable as its users have them, and Millrace's,
pinned. torch keeps pinned memory that is freed, so only the first session pins; each draws its weights anew, which
takes seconds and is not timed.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runtime.api import Runtime
from runtime.config import (
    DType,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.engine.records import PassRecord
from runtime.engine.sequence import Completion
from runtime.measure.machine import device_name
from runtime.plan.cost.rates import MachineRates
from runtime.stream.device import ComputeDevice
from runtime.stream.host_memory import available_bytes, peak_resident_bytes
from runtime.units import GIB, gib_to_bytes

from ..millrace import prefill_seconds, requests_of
from ..task import Result, forget_pages, prompts
from .config import MODEL_TYPE
from .link import measure_link
from .memory import cap, reserved_peak_bytes, start_anew
from .messages import GpuTask, Machine, Measurement
from .models import DrawnModel, DrawnRuntime, draw_model, parameters_of, size_of
from .peers import PeerModel, accelerated, model_of, partitioned
from .phases import phases_of
from .ways import CHUNK_TOKENS, MICRO_BATCHES, Way

PUBLISHED_LAYERS = 32
NUM_COPIES = 2  # of the weights in host memory
HOST_SHARE = 0.75  # of free memory, that they may take: buffers for what is read from disk come on top
DEVICE_SHARE = 0.7  # of the device, that the weights of the cut model may take
DISK_LAYERS, DISK_SHARE = 3, 0.5  # of the model on disk, at most, and of the disk's free bytes that it may take
MANY_WORDS = 1000  # a vocabulary of any size gives prompts of the same lengths
MOST_THREADS = 16  # that draw; more are no faster than memory


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
        self._whole_model, self._cut_model = (draw_model(gpu, folder, n) for n in (num_layers, cut_layers))
        disk_bytes = DISK_SHARE * shutil.disk_usage(folder).free
        self._num_disk_layers = size.layers_within(disk_bytes, min(DISK_LAYERS, num_layers))
        self._disk_model: DrawnModel | None = None
        self._folder = folder
        self._weight_bytes = size.of_layers(num_layers)
        self._host_gib = (free_bytes - self._weight_bytes) / GIB  # later, what torch keeps pinned looks taken
        self._runtimes: dict[Way, Runtime] = {}
        self._rates: MachineRates | None = None  # measured once for all: they only predict here, and decide nothing
        self._batch_sizes: dict[Way, int] = {}
        self._whole: PeerModel | None = None

    def machine(self) -> Machine:
        """Measures the link."""
        return Machine(
            device=device_name(self._device),
            link=measure_link(self._device),
            num_layers=self._whole_model.num_layers,
            weight_bytes=self._weight_bytes,
        )

    def measure(self, way: Way) -> Measurement:
        """Raises what a peer raises, or MillraceError. Nobody gets more of the device than may be used."""
        start_anew(self._device)
        cap(self._device, self._device_bytes)
        measured = self._peer(way) if way.is_peer else self._millrace(way)
        assert measured.result is not None, "what raises nothing has a result"
        peak_bytes = reserved_peak_bytes(self._device)
        return replace(measured, result=replace(measured.result, peak_device_bytes=peak_bytes))

    def _model(self, way: Way) -> DrawnModel:
        if way.tier is Tier.nvme:
            return self._on_disk()
        return self._cut_model if way.is_cut else self._whole_model

    def _on_disk(self) -> DrawnModel:
        """Written when it is first asked for; none of it stays in the page cache."""
        if self._disk_model is None:
            self._disk_model = draw_model(self._task.gpu, self._folder, self._num_disk_layers)
            self._disk_model.weights.write(self._num_threads)
            forget_pages(self._disk_model.path)
        return self._disk_model

    def _millrace(self, way: Way) -> Measurement:
        """The first pass is run once before."""
        runtime = self._runtime(way)
        requests = requests_of(runtime, self._prompts(way))
        passes: list[PassRecord] = []
        with runtime.confirmed_session(requests, rates=self._rates) as (plan, session):
            self._rates = plan.rates
            session.probe(requests)
            done = [completion for _, completion in session.generate(requests, passes.append)]
        return Measurement(
            way=way.name,
            num_layers=self._model(way).num_layers,
            num_sequences=len(requests),
            result=_result(runtime, passes, done),
            phases=phases_of(passes),
        )

    def _runtime(self, way: Way) -> Runtime:
        """A runtime for each way, kept."""
        if way not in self._runtimes:
            config, model = self._config(way), self._model(way)
            is_read = way.tier is Tier.nvme
            made = (
                Runtime(config, device=self._device) if is_read else DrawnRuntime(config, self._device, model.weights)
            )
            self._runtimes[way] = made
        return self._runtimes[way]

    def _config(self, way: Way) -> RuntimeConfig:
        gpu = self._task.gpu
        return RuntimeConfig(
            model=ModelConfig(name=MODEL_TYPE, path=str(self._model(way).path), dtype=DType.bfloat16),
            offload=OffloadConfig(
                tier=way.tier,
                device_memory_gib=gpu.device_memory_gib,
                host_memory_gib=self._host_gib,
                reader_threads=self._num_threads,
                resident_layers=0 if way.tier is Tier.nvme else None,
            ),
            policy=PolicyConfig(
                kind=PolicyKind.fixed,
                micro_batch_size=-(-gpu.num_prompts // (way.part * MICRO_BATCHES)),
                num_micro_batches=MICRO_BATCHES,
                schedule=way.order,
                attention=way.attention,
                admission=way.admission,
                prefill_chunk_tokens=self._chunk_tokens(way),
            ),
            sampling=SamplingConfig(max_new_tokens=gpu.num_new_tokens, ignore_eos=True, temperature=0.0),
            machine=MachineConfig(device=str(self._device.torch_device)),
        )

    def _chunk_tokens(self, way: Way) -> int:
        if way.num_pieces == 1:
            return CHUNK_TOKENS
        gpu = self._task.gpu
        lengths = [len(ids) for ids in prompts(gpu.num_prompts, MANY_WORDS, self._task.prompt_tokens)]
        return -(-sum(lengths) // (way.part * MICRO_BATCHES * way.num_pieces))

    def _peer(self, way: Way) -> Measurement:
        peer, ids = (self._held if way.is_cut else self._offloaded)(way), self._prompts(way)
        if way not in self._batch_sizes:
            self._batch_sizes[way] = peer.fitting(ids)
            start_anew(self._device)
        size = self._batch_sizes[way]
        result = peer.measure(ids[:size], self._task.gpu.num_new_tokens)
        if not way.is_cut:
            result = replace(result, bytes_copied=peer.num_forwards * self._weight_bytes)
        return Measurement(way=way.name, num_layers=self._model(way).num_layers, num_sequences=size, result=result)

    def _held(self, way: Way) -> PeerModel:
        """One tensor after the other, so that host memory holds no third copy."""
        place, model = self._device.torch_device, self._model(way)
        there = {
            name: tensor.to(place)
            for parameter in parameters_of(self._runtime(way))
            for name, tensor in model.weights.tensors([parameter], self._num_threads).items()
        }
        held = model_of(model.path, there)
        held.to(device=place)  # pyright: ignore[reportCallIssue] - its buffers
        return PeerModel(held, self._device)

    def _offloaded(self, way: Way) -> PeerModel:
        """Made once: it is the second copy of the weights."""
        if self._whole is None:
            tensors = self._model(way).weights.tensors(parameters_of(self._runtime(way)), self._num_threads)
            model = model_of(self._model(way).path, tensors)
            self._whole = (partitioned if self._task.is_alone else accelerated)(model, self._device)
        return self._whole

    def _prompts(self, way: Way) -> list[list[int]]:
        vocab_size, gpu = self._runtime(way).model.shape.vocab_size, self._task.gpu
        return prompts(gpu.num_prompts, vocab_size, self._task.prompt_tokens)[: max(1, gpu.num_prompts // way.part)]


def _result(runtime: Runtime, passes: Sequence[PassRecord], done: Sequence[Completion]) -> Result:
    tokens = {int(completion.request.id): list(completion.token_ids) for completion in done}
    seconds = sum(record.seconds for record in passes)
    return Result(
        seconds=seconds,
        prefill_seconds=prefill_seconds(passes),
        rate=sum(map(len, tokens.values())) / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=runtime.baseline_bytes,
        bytes_read=sum(record.times.bytes_read_disk for record in passes),
        tokens=[tokens[number] for number in sorted(tokens)],
        bytes_copied=sum(record.times.bytes_copied_device for record in passes),
        bytes_returned=sum(record.times.bytes_copied_host for record in passes),
    )
