"""Plans runs from the shapes of models (tensors and sizes) and profiles of machines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from runtime.checkpoint_source.localize import find_local_path
from runtime.config.settings import (
    ANY,
    BUILT_IN,
    MTP,
    DType,
    ExpertPaging,
    ModelConfig,
    Parallelism,
    PolicyKind,
    RuntimeConfig,
)
from runtime.errors import ConfigError, require
from runtime.measure.machine_cache import find_latest_rates
from runtime.plan.cost.machine import Machine, make_machine
from runtime.plan.cost.predict import Prediction
from runtime.plan.placement.defaults import gather_tables
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.planner import RunPlan, find_policy
from runtime.plan.rank_plans import RankView
from runtime.plan.resolved_settings import ResolvedSettings
from runtime.plan.search.candidate import Problem
from runtime.plan.search.drafts import draft_obstacle
from runtime.plan.search.workload import Workload
from runtime.plan.shape.attention import AttentionMethod
from runtime.plan.shape.dtypes import WeightStorage, resolve_auto_dtype, with_kv_dtype
from runtime.plan.shape.model import ModelShape
from runtime.planning.policy_cache import plan_with_cached_policy, policies_directory
from runtime.units import gib_to_bytes

from ..config.typed import build
from ..datasets.config import DatasetConfig
from .config import PlanConfig
from .published import PLAIN
from .shapes import read_shape


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and its inputs. `view`: what one rank (process) computes and stores. `run`: the plan of this rank.
    `machine`, `sizes` and predictions are of all ranks. `dtype`: compute dtype. `sizes`: lengths of all sequences.
    `warnings`: about rates of the machine. `stored`: storage formats of the weights."""

    config: RuntimeConfig
    machine: Machine
    view: RankView
    dtype: DType
    sizes: Sequence[SequenceSize]
    run: RunPlan
    warnings: tuple[str, ...]
    stored: WeightStorage

    @property
    def shape(self) -> ModelShape:
        """The shape of the model on one rank."""
        return self.view.shape

    @cached_property
    def peer_wait_share(self) -> float:
        """Fraction of the time that a rank waits for other ranks."""
        return self.view.waiting_share(self.run, self.view.sizes(self.sizes), self.config.policy.admission)

    @property
    def prediction(self) -> Prediction:
        assert self.run.prediction is not None, "the machine has rates"
        return self.run.prediction

    @property
    def resolved_settings(self) -> ResolvedSettings:
        return ResolvedSettings.from_plan(self.config, self.shape, self.run, dtype=self.dtype.value, stored=self.stored)

    @property
    def throughput(self) -> tuple[float | None, float | None, float | None]:
        """Predicted tokens per second: prompt tokens in prefill, new tokens in decode, and new tokens in both together.
        None without such passes."""
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
        """All new tokens except the first of each sequence, which prefill computes."""
        return sum(max(0, size.max_new_tokens - 1) for size in self.sizes)


def _per_second(num_tokens: int, seconds: float) -> float | None:
    return num_tokens / seconds if num_tokens and seconds else None


def with_prompts(config: PlanConfig) -> PlanConfig:
    """The settings with the number and lengths of the prompts in `dataset.path`, if it is set and `workload` lacks a
    value. Raises ConfigError and DatasetError."""
    if config.dataset.get("path") is None or None not in vars(config.workload).values():
        return config
    from .own_inputs import with_own_prompts  # imports torch and transformers

    return with_own_prompts(config, build(DatasetConfig, config.dataset, "dataset."))


def read_model_shape(
    config: PlanConfig, dtype: DType, *, is_plain: bool, has_device: bool
) -> tuple[ModelShape, WeightStorage]:
    """The shape of the model and its storage formats. They are from the files of a local model, from jobs/data for a
    named model, and from config.json on the hub for other models. `is_plain`: of the unquantized model. Raises
    ConfigError and CheckpointError."""
    model = config.model
    if model.name not in BUILT_IN and find_local_path(model) is None and (model.path is None or model.name != ANY):
        shape = read_shape(model.name, dtype, is_plain=is_plain)
        return shape, WeightStorage.from_losses(shape, {})
    from .own_inputs import read_own_shape  # imports torch and transformers

    shape, stored = read_own_shape(model, dtype, config.offload.cache_dir, is_plain=is_plain, has_device=has_device)
    return shape, WeightStorage.from_losses(shape, {}) if stored is None else stored


def make_plan(config: PlanConfig) -> Planned:
    """Plans the run of `config`. Raises ConfigError for unknown names, BudgetError if not even the smallest block fits
    into memory."""
    config, machine = with_prompts(config), config.machine
    if machine.sheet is None and machine.rates is None:  # use the latest measurement of this host by `jobs.measure`
        machine = replace(machine, rates=find_latest_rates(machine.device))
    planned = plan_for_machine(make_machine(machine, config.model.dtype), config)
    warning = machine.rates.missing_rates_warning(planned.dtype.value) if machine.rates is not None else None
    return replace(planned, warnings=(warning,) if warning is not None else ())


def plan_for_machine(machine: Machine, config: PlanConfig) -> Planned:
    """Plans like `make_plan`, for the given machine."""
    has_device, dtype, offload = machine.device_bytes is not None, config.model.dtype, config.offload
    if dtype is DType.auto:  # as in `make_machine`
        dtype = resolve_auto_dtype(DType.bfloat16, has_device=has_device, has_bfloat16=machine.has_bfloat16)
    shape, stored = _stored_shape(config, dtype, has_device=has_device)
    shape = with_kv_dtype(shape, config.kv.dtype)
    shape = replace(shape, attention_method=_choose_attention_method(machine, shape, dtype))
    if config.devices.way is Parallelism.one:
        shape = gather_tables(shape, offload, machine.budgets)
        draft, has_rope_lengths = config.policy.draft_model, shape.restart_tokens is not None
        if draft is not None and not draft_obstacle(config.runtime, shape, has_rope_lengths=has_rope_lengths):
            shape = replace(shape, draft=_draft_shape(config, draft, dtype, has_device=has_device))
    sizes = _sizes(config)
    longest = max(size.num_prompt_tokens + size.max_new_tokens for size in sizes)
    require(
        longest <= shape.context_tokens,
        f"workload.max_prompt_tokens plus sampling.max_new_tokens is {longest:,} tokens, above model={shape.name}'s "
        f"context of {shape.context_tokens:,}: lower one of them",
    )
    runtime, way, num_ranks = config.runtime, config.devices.way, config.plan.num_ranks
    if way is not Parallelism.one and offload.expert_paging is ExpertPaging.auto:  # ranks always read whole layers
        runtime = replace(runtime, offload=replace(offload, expert_paging=ExpertPaging.off))
    num_devices = machine.fabric.num_devices * machine.fabric.num_nodes
    require(
        num_ranks is not None or way is Parallelism.one or num_devices > 1,
        f"devices={way.value} needs several ranks, but machine={machine.name} has one device: set plan.num_ranks",
    )
    if num_ranks is None:
        num_ranks = 1 if way is Parallelism.one else num_devices
    host, device = offload.host_memory_gib, offload.device_memory_gib
    usable = replace(  # the machine with the memory limits of the run
        machine,
        host_bytes=machine.host_bytes if host is None else gib_to_bytes(host),
        device_bytes=machine.device_bytes if device is None or not has_device else gib_to_bytes(device),
    )
    view = RankView.from_shape(usable, shape, way, num_ranks, config.devices.experts)
    budgets, rates = view.machine.budgets, view.machine.rates
    problem = Problem(shape=view.shape, config=runtime, budgets=budgets, sizes=view.sizes(sizes), rates=rates)
    find = find_policy
    if runtime.policy.kind is not PolicyKind.fixed and runtime.policy.pin is not None:  # a cached policy
        find = partial(plan_with_cached_policy, policies_directory(offload.cache_dir), None)
    run = view.plan(problem, find)
    return Planned(
        config=runtime, machine=machine, view=view, dtype=dtype, sizes=sizes, run=run, warnings=(), stored=stored
    )


def _draft_shape(config: PlanConfig, draft: str, dtype: DType, *, has_device: bool) -> ModelShape:
    """The shape of the model that guesses tokens. Raises ConfigError for the head of a model without local files."""
    if draft != MTP:
        own = replace(config, model=ModelConfig.from_name(draft))
        return read_model_shape(own, dtype, is_plain=False, has_device=has_device)[0]
    if config.model.path is None or find_local_path(config.model) is None:
        raise ConfigError(
            f"policy.draft_model={MTP}: a plan reads the head's size from the checkpoint: set model to a local one"
        )
    from .own_inputs import read_own_shape  # imports torch and transformers

    cache_dir = config.offload.cache_dir
    return read_own_shape(config.model, dtype, cache_dir, is_plain=False, has_device=has_device, is_mtp_head=True)[0]


def _stored_shape(config: PlanConfig, dtype: DType, *, has_device: bool) -> tuple[ModelShape, WeightStorage]:
    """The shape of the model in the storage format of the plan, and the formats of its weights. Raises ConfigError if
    the format does not fit the model."""
    name, packed, quantize = config.model.name, config.plan.format, config.model.quantize
    shape, stored = read_model_shape(config, dtype, is_plain=packed is not None, has_device=has_device)
    if packed in (None, PLAIN) and quantize is None:
        return shape, stored
    require(
        packed is not None or shape == read_model_shape(config, dtype, is_plain=True, has_device=has_device)[0],
        f"model.quantize={quantize and quantize.value}: model={name} is already published quantized ({stored.names}): "
        f"leave model.quantize out, or set plan.format={PLAIN} to plan for an unquantized checkpoint",
    )
    from runtime.formats.registry import LOSSES  # imports torch, which other plans do not need

    from .packed_shapes import packed_shape, shape_in_format

    shape = packed_shape(shape, quantize) if quantize is not None else shape_in_format(shape, packed or PLAIN)
    return shape, WeightStorage.from_losses(shape, LOSSES)


def _choose_attention_method(machine: Machine, shape: ModelShape, dtype: DType) -> AttentionMethod:
    """The attention kernels that a run would use on the machine. A soft cap of the model, which flash kernels do not
    support, is ignored, because shapes do not have it."""
    if machine.device_bytes is None or not shape.is_packed:
        return AttentionMethod.host
    if shape.score_heads:
        return AttentionMethod.scored
    has_flash = machine.has_bfloat16 and dtype is not DType.float32 and not shape.kv_dtype.is_quantized
    return AttentionMethod.flash if has_flash else AttentionMethod.fused


def _sizes(config: PlanConfig) -> list[SequenceSize]:
    """The lengths of all sequences: of each sample and each beam of a prompt."""
    workload = config.workload
    count, mean, longest = workload.num_requests, workload.mean_prompt_tokens, workload.max_prompt_tokens
    assert count is not None, "checked by PlanConfig"
    assert mean is not None, "checked by PlanConfig"
    assert longest is not None, "checked by PlanConfig"
    try:
        num_beams = config.sampling.num_beams or 1
        sizes = Workload.from_mean(
            count * (config.sampling.n if num_beams == 1 else 1),
            mean=mean,
            longest=longest,
            max_new_tokens=config.sampling.max_new_tokens,
        ).sizes()
        return [beam for size in sizes for beam in [replace(size, num_beams=num_beams)] * num_beams]
    except ValueError as error:
        raise ConfigError(str(error)) from error
