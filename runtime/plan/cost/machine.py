"""Memories, rates and links of the machine to plan for, from a profile of the config group `machine`.

A profile has rates that `jobs.measure` measured, or the peak rates of a data sheet. Peak rates are multiplied by the
attainable shares below, which are assumptions and equal for all devices.
"""

from dataclasses import dataclass, field, replace

from ...config.profiles import DataSheet, DeviceLink, LinksConfig, MeasuredRates
from ...config.settings import DividedExperts, DType, MachineConfig, Parallelism
from ...errors import ConfigError
from ...units import gib_to_bytes
from ..placement.ledger import LIBRARY_BYTES, PINNED_SHARE
from ..placement.placement import Budgets
from ..shape.dtypes import has_bfloat16_units, resolve_auto_dtype
from ..shape.model import ModelShape
from ..shape.rank_shares import keeps_experts_whole
from ..shape.shapes import Stage, inner_size
from .rates import COMPUTE_RATES, UNLIMITED, MachineRates, interpolate

HOP_SECONDS = 10e-6  # latency per hop of a ring of devices: copy out, flag, copy in, launch
NODE_HOP_SECONDS = 50e-6  # latency per hop between hosts by TCP: an estimate, not measured
# (processes, bytes per second) of gathers by gloo within a host, measured with buffers of 64 MiB and two cores in all.
# More than four processes divide the rate of four.
GLOO_BYTES_PER_SECOND = [(2, 1.23e9), (4, 0.64e9)]
# Gathers per tensor-parallel layer: attention output, its projection, activations, down projection.
NUM_GATHERS = 4
HOST_RATES = (  # rates that the ranks of a host share
    "disk_bytes_per_second",
    "host_memory_bytes_per_second",
    "cpu_attention_bytes_per_second",
    "cpu_flops_per_second",
)
GIGA, TERA = 1e9, 1e12
# Attainable shares of a data sheet's numbers.
USABLE_SHARE = 0.9  # of a device's memory; driver and libraries use the remainder. For host memory: PINNED_SHARE
COMPUTE_SHARE = 0.8  # of dense FLOP/s at the base clock, in products of many rows; partial tiles waste the remainder
MEMORY_SHARE = 0.75  # of the bandwidth of device memory (ECC takes a part) and host memory
LINK_SHARE = 0.8  # of links between devices and to pinned host memory, per direction; packet headers take a part
NODE_LINK_SHARE = 0.9  # of a network by TCP, per direction
DISK_SHARE = 0.9  # of sequential reads
PREFILL_ATTENTION_SHARE = 0.4  # of dense FLOP/s at the base clock: attention runs prompt by prompt
DEQUANTIZE_SHARE = 0.7  # of device memory bandwidth, in kernels that dequantize weights: 0.55 to 0.75 on an H100
# Rates and overheads that data sheets lack.
DECODE_ATTENTION_ROUND_TRIPS = 3  # decode attention reads KV, writes it to a gathered copy, and reads that
CORE_ATTENTION_BYTES_PER_SECOND = 4e9  # KV bytes of our kernel on a core with AVX-512, in float32
CORE_FLOPS_PER_SECOND = 40e9  # products of many rows on a core with AVX2, in float32: two thirds of what we measured
LAUNCH_SECONDS = 10e-6  # host time of one operator, measured with an H100: docs/project/gpu-log.md
TURN_SECONDS = 1e-3  # a micro-batch in a dense layer: 84 launches and Python; 1.8e-3 for Mixtral on an H100
HIT_SECONDS = 12 * LAUNCH_SECONDS  # overhead per expert that is read by itself: 12 launches, counted on a fake device
PASS_SECONDS = 5e-3  # overhead per pass
ITEM_BYTES = {DType.float32: 4, DType.bfloat16: 2, DType.float16: 2}  # per element


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Links between devices and between hosts ("nodes"). Rates are attainable, in one direction."""

    num_devices: int = 1  # per host
    num_nodes: int = 1  # hosts
    device: DeviceLink | None = None  # None: ranks compute in host memory and exchange via gloo
    device_bytes_per_second: float = UNLIMITED  # link from one device to other devices
    host_bytes_per_second: float = UNLIMITED  # memory of a host
    node_bytes_per_second: float = UNLIMITED  # link from one host to other hosts

    def num_per_node(self, num_ranks: int) -> int:
        """Returns the number of ranks per host, if they use as few hosts as possible.

        Raises ConfigError if the machine has fewer devices than ranks, or if hosts would have unequal numbers of ranks.
        """
        if num_ranks <= self.num_devices or (self.device is None and self.num_nodes == 1):
            return num_ranks
        max_ranks = self.num_devices * self.num_nodes
        if num_ranks > max_ranks or num_ranks % self.num_devices:
            limit = f"one host has {self.num_devices} devices: set at most {self.num_devices}"
            if self.num_nodes > 1:
                limit = f"{self.num_nodes} hosts have {self.num_devices} devices each: set a multiple up to {max_ranks}"
            raise ConfigError(f"plan.num_ranks={num_ranks}: {limit}")
        return self.num_devices

    def gather_bytes_per_second(self, num_ranks: int) -> float:
        """Returns the gathered bytes per second of an all-gather in a ring, the rank's own part included.

        The slowest link limits a ring (Patarasuk and Yuan 2009). Each of n ranks sends and receives a share of
        (n - 1) / n of the gathered bytes.
        """
        if num_ranks == 1:
            return UNLIMITED
        per_node, sent_share = self.num_per_node(num_ranks), (num_ranks - 1) / num_ranks
        rates = [self._host_gather_rate(per_node, sent_share)] if per_node > 1 else []
        if per_node < num_ranks:
            rates.append(self.node_bytes_per_second / sent_share)
        return min(rates)

    def gather_seconds(self, num_ranks: int) -> float:
        """Returns the latency of an all-gather: the sum over all hops of the ring."""
        per_node = self.num_per_node(num_ranks)
        across = num_ranks // per_node if per_node < num_ranks else 0
        return (num_ranks - 1 - across) * HOP_SECONDS + across * NODE_HOP_SECONDS

    def send_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Returns the seconds for each rank to send bytes to the next rank, over the slowest link."""
        per_node, num_copies = self.num_per_node(num_ranks), 2 if self.device is DeviceLink.host else 1
        pair_rate = GLOO_BYTES_PER_SECOND[0][1] if self.device is None else self.device_bytes_per_second
        within = num_bytes * num_copies / pair_rate if per_node > 1 else 0.0
        across = num_bytes / self.node_bytes_per_second + NODE_HOP_SECONDS if per_node < num_ranks else 0.0
        return max(within + HOP_SECONDS, across)

    def _host_gather_rate(self, num_ranks: int, sent_share: float) -> float:
        """Returns the all-gather rate within a host. Devices without direct links write to host memory and read it."""
        if self.device is None:
            max_measured, rate = GLOO_BYTES_PER_SECOND[-1]
            if num_ranks > max_measured:
                return rate * max_measured / num_ranks
            return interpolate(GLOO_BYTES_PER_SECOND, num_ranks)
        seconds = sent_share / self.device_bytes_per_second
        if self.device is DeviceLink.host:
            seconds = max(seconds, 2 * num_ranks * sent_share / self.host_bytes_per_second)
        return 1 / seconds


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device and its host, as used by one process."""

    name: str
    host_bytes: int  # memory that the process may use
    device_bytes: int | None  # memory that the process may use; None: no device
    rates: MachineRates
    fabric: Fabric = field(default_factory=Fabric)
    library_bytes: int = 0  # see `Budgets`
    num_sharers: int = 1  # see `Budgets`
    has_bfloat16: bool = True  # False: bfloat16 is emulated

    @property
    def budgets(self) -> Budgets:
        return Budgets(
            host_bytes=self.host_bytes,
            device_bytes=self.device_bytes,
            library_bytes=self.library_bytes,
            num_sharers=self.num_sharers,
        )


def make_machine(config: MachineConfig, dtype: DType = DType.auto) -> Machine:
    """Makes the machine from its profile, for one compute dtype. `auto` is resolved as for a bfloat16 checkpoint.

    Raises ConfigError if there is no profile, or if it has no rates for this dtype.
    """
    if dtype is DType.auto:
        has_device = config.rates is None or config.rates.device_memory_gib is not None
        dtype = resolve_auto_dtype(DType.bfloat16, has_device=has_device, has_bfloat16=has_bfloat16_units(config))
    links = config.links or LinksConfig()
    if config.sheet is not None:
        return _machine_from_sheet(config.name, config.sheet, links, dtype)
    if config.rates is not None:
        return _machine_from_rates(config.name, config.rates, links, dtype, has_bfloat16=has_bfloat16_units(config))
    raise ConfigError(
        f"machine={config.name} has no rates: set a profile such as machine=l4, "
        "or measure this machine: python -m jobs.measure"
    )


def _machine_from_sheet(name: str, sheet: DataSheet, links: LinksConfig, dtype: DType) -> Machine:
    """Returns the machine of a data sheet. Host memory limits the rate of the link."""
    tflops = {DType.float16: sheet.float16_tflops, DType.bfloat16: sheet.bfloat16_tflops}.get(dtype)
    tflops = sheet.float32_tflops if tflops is None else tflops
    flops = tflops * TERA * min(1.0, sheet.base_clock_mhz / sheet.boost_clock_mhz)
    memory = sheet.memory_gb_per_second * GIGA * MEMORY_SHARE
    host = sheet.host_memory_gb_per_second * GIGA * MEMORY_SHARE
    link = min(sheet.host_link_gb_per_second * GIGA * LINK_SHARE, host)
    device_link = links.device_gb_per_second or sheet.host_link_gb_per_second
    # A product of M rows has 2 M FLOPs per weight. It takes as long as its FLOPs, or as reading its weights if this is
    # longer. Both are equal at `ridge_rows`. This one point is enough for `MachineRates.gemm_rate`: FLOP/s are
    # proportional to M below it, and constant above.
    ridge_rows = max(1, round(flops * COMPUTE_SHARE * ITEM_BYTES[dtype] / (2 * memory)))
    return Machine(
        name=name,
        fabric=Fabric(
            num_devices=sheet.num_devices,
            num_nodes=links.num_nodes,
            device=links.device,
            device_bytes_per_second=device_link * GIGA * LINK_SHARE,
            host_bytes_per_second=host,
            node_bytes_per_second=_per_second(links.node_gb_per_second, NODE_LINK_SHARE),
        ),
        has_bfloat16=sheet.bfloat16_tflops is not None,
        host_bytes=int(gib_to_bytes(sheet.host_memory_gib) * PINNED_SHARE),
        device_bytes=int(gib_to_bytes(sheet.memory_gib) * USABLE_SHARE),
        library_bytes=LIBRARY_BYTES,
        rates=MachineRates(
            disk_bytes_per_second=sheet.disk_gb_per_second * GIGA * DISK_SHARE,
            gemm_flops_per_second={ridge_rows: flops * COMPUTE_SHARE},
            link_in_bytes_per_second=link,
            link_out_bytes_per_second=link,
            memory_bytes_per_second=memory,
            attention_bytes_per_second=memory / DECODE_ATTENTION_ROUND_TRIPS,
            cpu_attention_bytes_per_second=min(host, sheet.host_num_cores * CORE_ATTENTION_BYTES_PER_SECOND),
            cpu_flops_per_second=sheet.host_num_cores * CORE_FLOPS_PER_SECOND,
            host_memory_bytes_per_second=host,
            prefill_attention_flops_per_second=flops * PREFILL_ATTENTION_SHARE,
            dequantize_bytes_per_second=sheet.memory_gb_per_second * GIGA * DEQUANTIZE_SHARE,
            launch_seconds=LAUNCH_SECONDS,
            turn_seconds=TURN_SECONDS,
            hit_seconds=HIT_SECONDS,
            pass_seconds=PASS_SECONDS,
        ),
    )


def _machine_from_rates(
    name: str, rates: MeasuredRates, links: LinksConfig, dtype: DType, *, has_bfloat16: bool
) -> Machine:
    """Returns the machine of a measured profile. Its compute device is the CPU if the profile has no device."""
    dtype_rates = rates.dtypes.get(dtype.value)
    if dtype_rates is None:
        known = ", ".join(rates.dtypes) or "none"
        raise ConfigError(f"machine={name} was not measured for model.dtype={dtype.value}; measured: {known}")
    device, device_link = rates.device_memory_gib, links.device_gb_per_second
    memory, link_in = rates.memory_gb_per_second * GIGA, _per_second(rates.link_in_gb_per_second)
    gemm = zip(rates.gemm_rows, dtype_rates.gemm_gflops, strict=False)  # old files lack the largest products
    return Machine(
        name=name,
        fabric=Fabric(
            num_nodes=links.num_nodes,
            device=None if device is None else links.device,
            device_bytes_per_second=device_link * GIGA * LINK_SHARE if device_link else link_in,
            node_bytes_per_second=_per_second(links.node_gb_per_second, NODE_LINK_SHARE),
        ),
        has_bfloat16=has_bfloat16,
        host_bytes=gib_to_bytes(rates.host_memory_gib),
        device_bytes=None if device is None else gib_to_bytes(device),
        library_bytes=0 if device is None else LIBRARY_BYTES,
        rates=MachineRates(
            disk_bytes_per_second=rates.disk_gb_per_second * GIGA,
            gemm_flops_per_second={num_rows: gflops * GIGA for num_rows, gflops in gemm},
            link_in_bytes_per_second=link_in,
            link_out_bytes_per_second=_per_second(rates.link_out_gb_per_second),
            memory_bytes_per_second=memory,
            attention_bytes_per_second=dtype_rates.attention_gb_per_second * GIGA,
            cpu_attention_bytes_per_second=dtype_rates.cpu_attention_gb_per_second * GIGA,
            prefill_attention_flops_per_second=dtype_rates.prefill_attention_gflops * GIGA,
            dequantize_bytes_per_second=UNLIMITED if device is None else memory * DEQUANTIZE_SHARE,
            launch_seconds=0.0 if device is None else LAUNCH_SECONDS,
            turn_seconds=rates.turn_seconds,
            hit_seconds=0.0 if device is None else HIT_SECONDS,
            pass_seconds=rates.pass_seconds,
        ),
    )


def _per_second(gb_per_second: float | None, share: float = 1.0) -> float:
    """Returns bytes per second; unlimited if the rate is None."""
    return UNLIMITED if gb_per_second is None else gb_per_second * GIGA * share


def rank_machine(
    machine: Machine, shape: ModelShape, parallelism: Parallelism, num_ranks: int, experts: DividedExperts
) -> Machine:
    """Returns one rank's share of `machine`. `shape`: the whole model.

    Raises ConfigError if the machine has too few devices.
    """
    if parallelism is Parallelism.one:
        return machine
    per_node = machine.fabric.num_per_node(num_ranks)
    rates, num_sharers = _rates_per_rank(machine, per_node), 1
    if parallelism is Parallelism.tensor:
        rates = _tensor_parallel_rates(rates, machine.fabric, shape, num_ranks, experts)
    elif parallelism is Parallelism.sharded:
        rates = _sharded_rates(rates, machine, num_ranks, num_ranks // per_node)
        # Devices exchange shards across hosts. Without devices, the ranks of each host share all weights.
        num_sharers = num_ranks if machine.device_bytes is not None or per_node == num_ranks else 1
    return replace(machine, host_bytes=machine.host_bytes // per_node, num_sharers=num_sharers, rates=rates)


def _rates_per_rank(machine: Machine, count: int) -> MachineRates:
    """Returns the rates of one of `count` ranks on a host, if all of them are busy."""
    rates = machine.rates.map_rates(HOST_RATES, lambda rate: rate / count)
    if machine.device_bytes is None:
        return rates.map_rates(COMPUTE_RATES, lambda rate: rate / count)
    from_host = machine.fabric.host_bytes_per_second / count
    return rates.map_rates(("link_in_bytes_per_second", "link_out_bytes_per_second"), lambda rate: min(rate, from_host))


def _sharded_rates(rates: MachineRates, machine: Machine, num_ranks: int, num_nodes: int) -> MachineRates:
    """Returns the rates with which all ranks together read shards of the weights and exchange them."""
    disk = num_ranks * rates.disk_bytes_per_second  # of all hosts together, as each byte is read once
    if machine.device_bytes is None:
        gathered = UNLIMITED if num_nodes == 1 else machine.fabric.gather_bytes_per_second(num_ranks)
        return replace(rates, disk_bytes_per_second=_serial_rate(disk, gathered))
    link = rates.link_in_bytes_per_second
    if machine.fabric.device is DeviceLink.host:
        # A host has its shard of every page of weights, and receives all other shards from other hosts.
        network = UNLIMITED if num_nodes == 1 else machine.fabric.node_bytes_per_second * num_nodes / (num_nodes - 1)
        shards = _serial_rate(link, network)
    else:
        shards = _serial_rate(num_ranks * link, machine.fabric.gather_bytes_per_second(num_ranks))
    return replace(
        rates,
        disk_bytes_per_second=disk,
        shard_bytes_per_second=shards,
        host_memory_bytes_per_second=UNLIMITED,  # not modeled, as the rates above are those of all ranks together
    )


def _tensor_parallel_rates(
    rates: MachineRates, fabric: Fabric, shape: ModelShape, num_ranks: int, experts: DividedExperts
) -> MachineRates:
    """Returns the rates with the exchanges of a tensor-parallel layer.

    For each token, ranks gather attention outputs, feed-forward activations (or outputs of whole experts), and two
    hidden vectors.
    """

    def inner_elements(stage: Stage) -> float:
        """Returns the elements per token that ranks exchange within a feed-forward layer."""
        if keeps_experts_whole(stage, shape.hidden_size, num_ranks, experts):
            return stage.num_experts_per_token * shape.hidden_size / num_ranks
        return stage.num_experts_per_token * inner_size(stage, shape.hidden_size) or shape.intermediate_size

    inner = [inner_elements(stage) for stage in shape.layers]
    elements_per_token = shape.num_heads * shape.head_dim + sum(inner) / max(1, len(inner)) + 2 * shape.hidden_size
    gathered = fabric.gather_bytes_per_second(num_ranks)
    return replace(
        rates,
        exchange_bytes_per_second=gathered * shape.hidden_size / elements_per_token,
        exchange_seconds=NUM_GATHERS * fabric.gather_seconds(num_ranks),
    )


def _serial_rate(*rates: float) -> float:
    """Returns the rate of bytes that cross several links one after another, without overlap."""
    return 1 / sum(1 / rate for rate in rates)
