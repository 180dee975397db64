"""Decode passes as CUDA graphs: with resident weights, launching a pass takes longer than running it. A recording has
one lane with a fixed number of rows and positions, padded so that few recordings serve many passes. Sampling is not
recorded."""

import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple, TypeAlias

import torch

from ..attention.fixed import FixedRows, GroupKeys, Size, fit_sizes, group_keys_from_rows
from ..attention.views import Reach
from ..cache.paged import PassView
from ..errors import ConfigError, Interrupted
from ..events import Event, NeedAttention, NeedStage, Weights
from ..plan.placement.memory import NUM_RECORDINGS
from ..stream.device import ComputeDevice
from .experts import BatchedExperts
from .lanes.lane import Lane
from .lanes.packed import PackedLane
from .monitor import PassMonitor
from .player import RESUME_HINT
from .setup import Setup

log = logging.getLogger(__name__)

ROW_MULTIPLE = 8  # recordings have a multiple of this many rows
Key: TypeAlias = tuple[int, frozenset[tuple[Reach, Size]]]  # number of rows, and sizes by attention window


class _RecordedInputs(NamedTuple):
    inputs: tuple[torch.Tensor, torch.Tensor]
    view: PassView
    rows: FixedRows
    selected_B: torch.Tensor
    offsets_T: torch.Tensor  # kept alive and updated: the recorded graph may read it

    def fill(self, inputs: tuple[torch.Tensor, torch.Tensor], view: PassView) -> None:
        for target, source in zip(self.inputs, inputs, strict=True):
            target.copy_(source)
        assert view.decoding is not None, "its rows decode"
        self.offsets_T.copy_(view.offsets_T)
        self.rows.fill(view.decoding, view.layout)


class RecordedPasses:
    """Plays decode passes. The first pass of a row count is launched normally, the second is recorded, later ones are
    replayed. Raises ConfigError if the run cannot use recordings."""

    def __init__(
        self,
        setup: Setup,
        weights_of: Callable[[int], Weights],
        experts: BatchedExperts,
        monitor: PassMonitor,
        should_stop: Callable[[], bool],
        *,
        is_alone: bool,
    ):
        _require_recordable(setup, is_alone=is_alone)
        self._device: ComputeDevice = setup.device
        self._weights_of, self._experts = weights_of, experts
        self._monitor, self._should_stop = monitor, should_stop
        self._last_stage = len(setup.model.shape.stages) - 1
        self._group_keys: GroupKeys | None = None
        self._logits_BV: torch.Tensor | None = None  # for the largest row count so far
        self._num_launches, self._failed = Counter[int](), set[int]()
        # Inputs, logits and replay. All recordings write logits to the same memory: read them before the next replay.
        self._recordings: dict[Key, tuple[_RecordedInputs, torch.Tensor, Callable[[], None]]] = {}

    def play(self, lane: Lane, new_tokens: Rows[int] | None, launch: Callable[[], None]) -> None:
        """Runs a pass of the lane, which can then sample. `launch` runs it operator by operator. `new_tokens`: as for
        `begin_pass`."""
        if self._should_stop():
            raise Interrupted(RESUME_HINT)
        lane.prepare_pass(new_tokens)
        if not isinstance(lane, PackedLane) or not lane.is_pure_decode:
            launch()
            return
        cache, num_rows = lane.cache, -(-len(lane.sequences) // ROW_MULTIPLE) * ROW_MULTIPLE
        if self._group_keys is None:  # the layers' attention windows are known after a first pass
            launch()
            assert cache.decoding is not None, "its rows decode"
            self._group_keys = group_keys_from_rows(cache.decoding)
            return
        view = cache.padded_view(num_rows)
        assert view.decoding is not None, "its rows decode"
        sizes = fit_sizes(view.decoding, self._group_keys)
        key = num_rows, frozenset((sizes or {}).items())
        if sizes is None or num_rows in self._failed:
            launch()
            return
        inputs = _pad_rows(lane.inputs[0], num_rows), _pad_rows(lane.inputs[1], num_rows)
        if key in self._recordings:
            recorded, logits_BV, replay = self._recordings[key]
            recorded.fill(inputs, view)
            self._replay(lane, logits_BV, replay)
            return
        recorded = _RecordedInputs(
            inputs,
            view,
            FixedRows(view.decoding, view.layout, self._group_keys, sizes),
            torch.arange(num_rows, device=self._device.torch_device),
            view.offsets_T,
        )
        lane.substitute_inputs(recorded.inputs, recorded.view, recorded.selected_B)
        self._num_launches[num_rows] += 1
        if self._num_launches[num_rows] == 1:
            launch()  # warm-up with the same shapes: kernels must be loaded before capture
            logits_BV = lane.take_logits()
            if self._logits_BV is None or len(self._logits_BV) < len(logits_BV):
                self._logits_BV = torch.empty_like(logits_BV)
            return
        if len(self._recordings) == NUM_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        try:
            logits_BV, replay = self._device.record_graph(lambda: self._compute(lane))
        except RuntimeError as error:  # includes out of memory
            log.warning("decode passes of %d rows cannot be recorded: %s", num_rows, error)
            self._failed.add(num_rows)
            lane.abandon()
            launch()
            return
        self._recordings[key] = recorded, logits_BV, replay
        self._replay(lane, logits_BV, replay)

    def _replay(self, lane: PackedLane, logits_BV: torch.Tensor, replay: Callable[[], None]) -> None:
        begin = self._monitor.begin_compute()
        replay()
        self._monitor.end_compute(self._last_stage, "replay", begin, len(lane.sequences))
        lane.take_logits(logits_BV)

    def _compute(self, lane: PackedLane) -> torch.Tensor:
        """Runs a pass and returns its logits. Does not use the monitor: its events cannot be recorded in a graph."""
        event: Event | None = lane.begin_pass()
        stage = 0
        while event is not None:
            if isinstance(event, NeedStage):
                stage = event.stage
                answer = self._weights_of(stage)
            elif isinstance(event, NeedAttention):
                answer = event.compute()
            else:
                answer = self._experts.run(stage, [event])[0]
            event = lane.advance(answer)
        assert self._logits_BV is not None, "a pass of as many rows was launched before"
        return self._logits_BV[: lane.cache.view.num_rows].copy_(lane.take_logits())


def _pad_rows(tensor_1T: torch.Tensor, num_rows: int) -> torch.Tensor:
    missing = num_rows - tensor_1T.shape[1]
    return torch.cat([tensor_1T, tensor_1T[:, :1].expand(1, missing)], 1)


def _require_recordable(setup: Setup, *, is_alone: bool) -> None:
    loaded, placement, policy = setup.model, setup.placement, setup.config.policy
    num_lanes = policy.num_micro_batches
    requirements = {
        f"{setup.device.torch_device} is not a CUDA device": setup.device.can_record,
        "ranks exchange results; set devices=one": is_alone,
        "weights or KV are offloaded; set offload=none and kv=device": placement.is_fully_resident,
        f"there are {num_lanes} lanes; set policy.num_micro_batches=1": num_lanes in (None, 1),
        "this class runs in padded lanes": loaded.shape.is_packed,
        "this class caches latents": not loaded.expands_latents,
        "this class's rotary embeddings depend on a sequence's length": loaded.rope_lengths is None,
        "KV pages are quantized; set kv.dtype=auto": not loaded.shape.kv_dtype.is_quantized,
    }
    for reason, is_met in requirements.items():
        if not is_met:
            raise ConfigError(f"model.graphs=true: passes cannot be recorded: {reason}; or set model.graphs=false")
