"""Plans runs from bundled shapes, facts about models and machine profiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from runtime.config.settings import DType, ExpertPaging, Parallelism, PolicyKind, RuntimeConfig
from runtime.errors import ConfigError, require
from runtime.measure.machine_cache import find_latest_rates
from runtime.plan.cost.machine import Machine, make_machine
from runtime.plan.cost.predict import Prediction
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.planner import RunPlan, find_policy
from runtime.plan.rank_plans import RankView
from runtime.plan.resolved_settings import ResolvedSettings
from runtime.plan.search.candidate import Problem
from runtime.plan.search.workload import Workload
from runtime.plan.shape.attention import AttentionMethod
from runtime.plan.shape.dtypes import WeightStorage, resolve_auto_dtype, with_kv_dtype
from runtime.plan.shape.model import ModelShape
from runtime.planning.policy_cache import plan_with_cached_policy, policies_directory
from runtime.units import gib_to_bytes

from .config import PlanConfig
from .published import PLAIN
from .shapes import read_shape


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with its inputs. `dtype`: compute dtype. With several ranks, `run` is the plan of one, described by
    `view`; `machine`, `sizes` and predictions are of all."""

    config: RuntimeConfig
    machine: Machine
    view: RankView
    dtype: DType
    sizes: Sequence[SequenceSize]
    run: RunPlan
    warnings: tuple[str, ...]  # about what is known of the machine
    stored: WeightStorage

    @property
    def shape(self) -> ModelShape:
        """The shape of the model on one rank."""
        return self.view.shape

    @cached_property
    def peer_wait_share(self) -> float:
        """The fraction of the time that a rank waits for other ranks."""
        return self.view.waiting_share(self.run, self.view.sizes(self.sizes), self.config.policy.admission)

    @property
    def prediction(self) -> Prediction:
        assert self.run.prediction is not None, "a machine has rates"
        return self.run.prediction

    @property
    def resolved_settings(self) -> ResolvedSettings:
        return ResolvedSettings.from_plan(self.config, self.shape, self.run, dtype=self.dtype.value, stored=self.stored)

    @property
    def throughput(self) -> tuple[float | None, float | None, float | None]:
        """Tokens per second as runs count them: prompt tokens of prefill passes, new tokens of decode passes, and new
        tokens over both. None without such passes."""
        predicted = self.prediction
        prefill = _per_second(self.num_prompt_tokens, predicted.prefill_seconds)
        decode = _per_second(self.num_decoded_tokens, predicted.decode_seconds)
        return prefill, decode, _per_second(self.num_new_tokens, predicted.seconds)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(size.num_prompt_tokens for size in self.sizes)

    @property
    def num_new_tokens(self) -> int:
        return sum(size.max_new_tokens for size in self.sizes)

    @property
    def num_decoded_tokens(self) -> int:
        """New tokens without the first of each prompt, which prefill computes."""
        return sum(max(0, size.max_new_tokens - 1) for size in self.sizes)


def _per_second(num_tokens: int, seconds: float) -> float | None:
    return num_tokens / seconds if num_tokens and seconds else None


def make_plan(config: PlanConfig) -> Planned:
    """Plans the run of `config`. Raises ConfigError for unknown names, BudgetError if even the smallest block does
    not fit."""
    described = config.machine
    if described.sheet is None and described.rates is None:  # what `jobs.measure` last kept of this host
        described = replace(described, rates=find_latest_rates(described.device))
    planned = plan_for_machine(make_machine(described, config.model.dtype), config)
    missing = described.rates.missing_rates_warning(planned.dtype.value) if described.rates is not None else None
    return replace(planned, warnings=(missing,) if missing is not None else ())


def plan_for_machine(machine: Machine, config: PlanConfig) -> Planned:
    """Plans as `make_plan` does, for any machine."""
    has_device, dtype, offload = machine.device_bytes is not None, config.model.dtype, config.offload
    if dtype is DType.auto:  # as `make_machine` takes it
        dtype = resolve_auto_dtype(DType.bfloat16, has_device=has_device, has_bfloat16=machine.has_bfloat16)
    shape, stored = _stored_shape(config, dtype)
    shape = with_kv_dtype(shape, config.kv.dtype)
    shape = replace(shape, attention_method=_choose_attention_method(machine, shape, dtype))
    sizes = _sizes(config)
    longest = max(size.num_prompt_tokens + size.max_new_tokens for size in sizes)
    require(
        longest <= shape.context_tokens,
        f"model={shape.name} knows {shape.context_tokens:,} positions, and the longest prompt comes to {longest:,} "
        "with its answer: workload.max_prompt_tokens, sampling.max_new_tokens",
    )
    runtime, way, asked = config.runtime, config.devices.way, config.plan.num_ranks
    if way is not Parallelism.one and offload.expert_paging is ExpertPaging.auto:  # ranks read layers whole
        runtime = replace(runtime, offload=replace(offload, expert_paging=ExpertPaging.off))
    most = machine.fabric.num_devices * machine.fabric.num_nodes
    require(
        asked is not None or way is Parallelism.one or most > 1,
        f"devices={way.value} is of several ranks, and machine={machine.name} names one device: set plan.num_ranks",
    )
    num_ranks = asked if asked is not None else 1 if way is Parallelism.one else most
    host, device = offload.host_memory_gib, offload.device_memory_gib
    usable = replace(  # what the run may use of the host and of each device, where nothing is said all that there is
        machine,
        host_bytes=machine.host_bytes if host is None else gib_to_bytes(host),
        device_bytes=machine.device_bytes if device is None or not has_device else gib_to_bytes(device),
    )
    view = RankView.from_shape(usable, shape, way, num_ranks, config.devices.experts)
    problem = Problem(
        shape=view.shape,
        config=runtime,
        budgets=view.machine.budgets,
        sizes=view.sizes(sizes),
        rates=view.machine.rates,
    )
    find = find_policy
    if runtime.policy.kind is not PolicyKind.fixed and runtime.policy.pin is not None:  # kept by runs of this user
        find = partial(plan_with_cached_policy, policies_directory(offload.cache_dir), None)
    run = view.plan(problem, find)
    return Planned(
        config=runtime, machine=machine, view=view, dtype=dtype, sizes=sizes, run=run, warnings=(), stored=stored
    )


def _stored_shape(config: PlanConfig, dtype: DType) -> tuple[ModelShape, WeightStorage]:
    """The shape of the model with weights as they are stored, and their formats. Raises ConfigError for a format that
    this model cannot have."""
    name, asked, quantize = config.model.name, config.plan.format, config.model.quantize
    shape = read_shape(name, dtype, is_plain=asked is not None)
    stored = WeightStorage.from_losses(shape, {})
    if asked in (None, PLAIN) and quantize is None:
        return shape, stored
    require(
        asked is not None or shape == read_shape(name, dtype, is_plain=True),
        f"model.quantize={quantize and quantize.value}: model={name} is published in fewer bytes already "
        f"({stored.names}): leave model.quantize out, or set plan.format={PLAIN} to plan for an unquantised checkpoint",
    )
    from runtime.formats.registry import LOSSES  # loads torch, which no other plan needs

    from .packed_shapes import packed_shape, shape_in_format

    found = packed_shape(shape, quantize) if quantize is not None else shape_in_format(shape, asked or PLAIN)
    return found, WeightStorage.from_losses(found, LOSSES)


def _choose_attention_method(machine: Machine, shape: ModelShape, dtype: DType) -> AttentionMethod:
    """The attention kernels of the machine. Devices with bfloat16 units also run flash kernels. A model's soft cap is
    not known here, and kernels support only sinks."""
    if machine.device_bytes is None or not shape.is_packed:
        return AttentionMethod.host
    if shape.score_heads:
        return AttentionMethod.scored
    has_flash = machine.has_bfloat16 and dtype is not DType.float32 and not shape.kv_dtype.is_quantized
    return AttentionMethod.flash if has_flash else AttentionMethod.fused


def _sizes(config: PlanConfig) -> list[SequenceSize]:
    workload = config.workload
    count, mean, most = workload.num_requests, workload.mean_prompt_tokens, workload.max_prompt_tokens
    assert count is not None, "the config class has checked it"
    assert mean is not None, "the config class has checked it"
    assert most is not None, "the config class has checked it"
    try:
        num_beams = config.sampling.num_beams or 1
        sizes = Workload.from_mean(
            count * (config.sampling.n if num_beams == 1 else 1),
            mean=mean,
            longest=most,
            max_new_tokens=config.sampling.max_new_tokens,
        ).sizes()
        return [beam for size in sizes for beam in [replace(size, num_beams=num_beams)] * num_beams]
    except ValueError as error:
        raise ConfigError(str(error)) from error
