"""Sweeps: make plans that vary one quantity of a plan, such as the memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf

from runtime.config.settings import Parallelism, PolicyKind
from runtime.errors import BudgetError, ConfigError, require
from runtime.plan.shape.dtypes import WeightStorage
from runtime.plan.shape.model import ModelShape
from runtime.resources import Resource
from runtime.units import GIB

from .config import PackedFormat, PlanConfig, Sweep
from .planning import Planned, plan_for_machine, read_model_shape
from .published import PLAIN, read_losses

GIGA = 1e9
RANKS = "ranks"
# Values of a sweep: the value of the plan, times powers of STEP with these exponents.
STEP = 2**0.5
STEPS, BLOCK_STEPS = range(-4, 7), range(-8, 9)
MEMORY_STEP, MEMORY_STEPS = 2**0.25, range(-6, 5)
LIMIT_SHARE = 0.05  # relative precision of the largest block that fits, which is bisected


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A varied quantity. `base_value`: its value in the original plan. `plan`: makes the plan for a value. `is_open`:
    the sweep stops at the first value that does not fit. `note`: text for the table."""

    name: str
    unit: str
    base_value: float
    values: Sequence[float]
    plan: Callable[[float], Planned]
    is_open: bool = False
    note: str = ""

    def points(self) -> Iterator["SweepPoint"]:
        """Yields a point for each value. On an open axis, the last points are the largest value that fits, and the
        smallest that does not."""
        fitting = 0.0
        for value in self.values:
            point = self.try_value(value)
            if self.is_open and point.planned is None:
                yield from self._limit(fitting, value)
                break
            yield point
            fitting = value

    def try_value(self, value: float) -> "SweepPoint":
        """Makes the plan for one value. An error becomes the `refusal` of the point."""
        try:
            return SweepPoint(axis=self, value=value, planned=self.plan(value))
        except (BudgetError, ConfigError) as error:  # too large for the memory, or for the model's context
            return SweepPoint(axis=self, value=value, planned=None, refusal=str(error).splitlines()[0])

    def _limit(self, fitting: float, refused: float) -> Iterator["SweepPoint"]:
        """Bisects between `fitting` and `refused`. Yields the largest value that fits, unless it is `fitting`, and the
        smallest that does not."""
        largest, smallest = None, self.try_value(refused)
        low, high = fitting, refused
        while high - low > max(1, LIMIT_SHARE * low):
            point = self.try_value((low + high) // 2)
            if point.planned is None:
                smallest, high = point, point.value
            else:
                largest, low = point, point.value
        yield from [largest] if largest is not None else []
        yield smallest


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """A value of an axis and its plan. If no plan fits, `planned` is None and `refusal` the reason."""

    axis: Axis
    value: float
    planned: Planned | None
    refusal: str = ""

    @property
    def binding(self) -> Resource | None:
        """The resource that is busy longest in decode passes, and so limits them."""
        return self.planned.prediction.decode.binding if self.planned is not None else None


def sweep(axes: Sequence[Axis]) -> Iterator[SweepPoint]:
    """Yields each point as soon as its plan is made. With policy=hrm, a policy is searched for each point."""
    for axis in axes:
        yield from axis.points()


def sweep_axes(config: PlanConfig, planned: Planned) -> list[Axis]:
    """The axes of `config.plan.sweep`, around `planned`. Raises ConfigError if there is nothing to vary."""
    kind = config.plan.sweep
    assert kind is not None, "plan.sweep is set"
    make_axes = {
        Sweep.memory: _memory_axes,
        Sweep.batch: _block_axes,
        Sweep.prompt: _prompt_axes,
        Sweep.bandwidth: _bandwidth_axes,
        Sweep.format: _format_axes,
        Sweep.devices: _parallelism_axes,
    }
    axes, points = make_axes[kind](config, planned), config.plan.sweep_points
    if not points:
        return axes
    fixed = axes[:1] if kind is Sweep.devices else []  # the axis of one process has one value
    return [*fixed, *(replace(axis, values=points, is_open=False) for axis in axes[len(fixed) :])]


def _memory_axes(config: PlanConfig, planned: Planned) -> list[Axis]:
    """An axis for each memory of the plan."""

    def plan(key: str, gib: float) -> Planned:
        return plan_for_machine(planned.machine, replace(config, offload=replace(config.offload, **{key: gib})))

    return [
        Axis(
            name=f"{ledger.memory} memory",
            unit="GiB",
            base_value=ledger.budget_bytes / GIB,
            values=_steps(ledger.budget_bytes / GIB, MEMORY_STEPS, MEMORY_STEP),
            plan=partial(plan, f"{ledger.memory}_memory_gib"),
        )
        for ledger in reversed(planned.run.placement.ledgers)
    ]


def _block_axes(config: PlanConfig, planned: Planned) -> list[Axis]:
    """The axis of the number of sequences in one block, with micro-batches and placement as in the plan."""
    has_device = planned.machine.device_bytes is not None
    choice, base = planned.run.choice, planned.config
    base = choice.best.policy.apply(base, has_device=has_device) if choice is not None else base

    def plan(num_sequences: float) -> Planned:
        count = ceil(num_sequences / planned.run.lane_size)
        policy = replace(
            base.policy, kind=PolicyKind.fixed, micro_batch_size=ceil(num_sequences / count), num_micro_batches=count
        )
        block = replace(
            config,
            policy=policy,
            kv=base.kv,
            workload=replace(config.workload, num_requests=round(num_sequences)),
            sampling=replace(config.sampling, n=1, num_beams=None),
        )
        return plan_for_machine(planned.machine, block)

    base_value = max(len(block.members) for block in planned.run.blocks)
    sizes = sorted({max(1, round(size)) for size in _steps(base_value, BLOCK_STEPS)})
    return [Axis(name="block", unit="sequences", base_value=base_value, values=sizes, plan=plan, is_open=True)]


def _prompt_axes(config: PlanConfig, planned: Planned) -> list[Axis]:
    """The axis of the mean prompt length. The longest prompt grows in proportion."""
    workload = config.workload
    mean, longest = workload.mean_prompt_tokens, workload.max_prompt_tokens
    assert mean is not None, "checked by PlanConfig"
    assert longest is not None, "checked by PlanConfig"
    limit = planned.shape.context_tokens - config.sampling.max_new_tokens

    def plan(tokens: float) -> Planned:
        max_prompt_tokens = max(ceil(tokens), round(longest * tokens / mean))
        changed = replace(workload, mean_prompt_tokens=tokens, max_prompt_tokens=max_prompt_tokens)
        return plan_for_machine(planned.machine, replace(config, workload=changed))

    values = [tokens for tokens in _steps(mean, STEPS) if tokens >= 1 and longest * tokens / mean <= limit]
    return [Axis(name="mean prompt", unit="tokens", base_value=mean, values=values, plan=plan)]


def _bandwidth_axes(config: PlanConfig, planned: Planned) -> list[Axis]:
    """An axis for the bandwidth of each link that the plan uses."""
    rates, phases = planned.machine.rates, planned.prediction.phases.values()
    links = {  # name: resource, and bytes per second
        "disk": (Resource.disk, rates.disk_bytes_per_second),
        "link": (Resource.host_to_device, rates.link_in_bytes_per_second),
    }

    def plan(name: str, gb_per_second: float) -> Planned:
        rate = gb_per_second * GIGA
        if name == "disk":
            changed = replace(rates, disk_bytes_per_second=rate)
        else:  # both directions
            out_rate = rates.link_out_bytes_per_second * rate / rates.link_in_bytes_per_second
            changed = replace(rates, link_in_bytes_per_second=rate, link_out_bytes_per_second=out_rate)
        return plan_for_machine(replace(planned.machine, rates=changed), config)

    axes = [
        Axis(
            name=f"{name} bandwidth",
            unit="GB/s",
            base_value=rate / GIGA,
            values=_steps(rate / GIGA, STEPS),
            plan=partial(plan, name),
        )
        for name, (resource, rate) in links.items()
        if rate < inf and any(phase.busy_seconds[resource] for phase in phases)
    ]
    if not axes:
        raise ConfigError(
            "plan.sweep=bandwidth: this plan moves nothing over a disk or a link; set offload=cpu or offload=nvme, or "
            "lower offload.device_memory_gib or offload.host_memory_gib"
        )
    return axes


def _format_axes(config: PlanConfig, planned: Planned) -> list[Axis]:
    """An axis for each format of `weightstream pack`. Its only value is the bytes of the weights. On a CPU, matrix
    products are assumed to be as fast as with the published weights."""
    from runtime.formats.registry import LOSSES  # imports torch, which other sweeps do not need

    from .packed_shapes import shape_in_format

    measured = {row["format"]: row["weight_error"] for row in read_losses()}

    def note(stored: ModelShape) -> str:
        """Formats the storage formats and, if they round, the RMS error measured on the bundled model."""
        storage = WeightStorage.from_losses(stored, LOSSES)
        errors = [f"{measured[name]:.2%}" for name in storage.formats if name in measured]
        return f"{storage.names}: lossy, RMS error {errors[0]} for model=tiny" if errors else str(storage)

    def plan(changed: PlanConfig, _: float) -> Planned:
        return plan_for_machine(planned.machine, changed)

    has_device = planned.machine.device_bytes is not None
    shape, plain = (
        read_model_shape(config, planned.dtype, is_plain=is_plain, has_device=has_device)[0]
        for is_plain in (False, True)
    )
    unquantized = [PLAIN] if shape != plain else []
    published = replace(config, model=replace(config.model, quantize=None))
    axes = []
    for name in (None, *unquantized, *PackedFormat.__members__):
        stored = shape if name is None else shape_in_format(plain, name)
        changed = replace(published, plan=replace(config.plan, format=name))
        axis = Axis(
            name="published" if name is None else name,
            unit="GB",
            base_value=planned.view.whole.weight_bytes / GIGA,
            values=[stored.weight_bytes / GIGA],
            plan=partial(plan, changed),
            note=note(stored),
        )
        axes.append(axis)
    return axes


def _parallelism_axes(config: PlanConfig, planned: Planned) -> list[Axis]:
    """An axis for one process, and for each kind of parallelism with 2, 4 ... ranks, up to all devices."""
    fabric = planned.machine.fabric
    num_devices = fabric.num_devices * fabric.num_nodes
    counts = [2**power for power in range(1, num_devices.bit_length()) if 2**power <= num_devices]
    require(
        bool(counts or config.plan.sweep_points),
        f"plan.sweep=devices: machine={planned.machine.name} has one device: set plan.sweep_points to numbers of ranks",
    )

    def plan(way: Parallelism, num_ranks: float) -> Planned:
        devices, output = config.devices.for_parallelism(way), replace(config.plan, num_ranks=round(num_ranks))
        return plan_for_machine(planned.machine, replace(config, devices=devices, plan=output))

    return [
        Axis(
            name=way.value,
            unit=RANKS,
            base_value=planned.view.num_ranks,
            values=[1] if way is Parallelism.one else counts,
            plan=partial(plan, way),
        )
        for way in Parallelism
    ]


def _steps(base_value: float, steps: range, step: float = STEP) -> list[float]:
    """The values `base_value` x `step` ** n for n in `steps`, rounded to three digits except for `base_value`
    itself."""
    return [float(f"{base_value * step**number:.3g}") if number else base_value for number in steps]
