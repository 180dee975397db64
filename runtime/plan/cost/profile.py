"""The way from a profile of the `machine` group to the machine that a plan is made for.

A data sheet prints peaks. What a run attains of them is an assumption, the same for every device and stated here
once, share by share; `jobs.measure` on the machine itself replaces all of it.
"""

from dataclasses import replace

from ...config.profiles import DataSheet, LinksConfig, MeasuredRates
from ...config.settings import DType, MachineConfig
from ...errors import ConfigError
from ...units import gib_to_bytes
from ..placement.ledger import LIBRARY_BYTES, PINNED_SHARE
from ..shape.dtypes import auto_dtype, has_bfloat16_units
from .links import Fabric
from .machine import Machine
from .rates import UNLIMITED, MachineRates

GIGA, TERA = 1e9, 1e12
USABLE_SHARE = 0.9  # of a device's memory: the rest is the driver's and the libraries'; of the host's `PINNED_SHARE`
COMPUTE_SHARE = 0.8  # of dense FLOP/s at the base clock, in products of many rows: tiles do not fit
MEMORY_SHARE = 0.75  # of a memory's bandwidth, the device's (its ECC takes a part) and the host's
LINK_SHARE = 0.8  # of one direction, of links to the host from pinned memory, and between devices: packets have headers
NODE_LINK_SHARE = 0.9  # of one direction of a network, by TCP
DISK_SHARE = 0.9  # of sequential reads
PREFILL_ATTENTION_SHARE = 0.4  # of dense FLOP/s at the base clock: prompts attend one by one
DECODE_ATTENTION_TRIPS = 3  # pages are gathered before they are multiplied: read, written, read
CORE_ATTENTION_BYTES_PER_SECOND = 4e9  # of KV, by our kernel on a core with AVX-512, float32
CORE_FLOPS_PER_SECOND = 40e9  # products of many rows on a core, float32, AVX2: two thirds of what we measured
LAUNCH_SECONDS = 10e-6  # of the host for one operator, as measured beside an H100: docs/first-gpu-run.md
TURN_SECONDS = 1e-3  # of one decoder layer, 84 launches of a dense one and Python around them; 2.4 ms and more there
HIT_SECONDS = 12 * LAUNCH_SECONDS  # of an expert that is read by itself, as counted on a double
PASS_SECONDS = 5e-3
DEQUANTIZE_SHARE = 0.5  # of a device's bandwidth, of kernels that dequantize weights: an assumption, no card has said
ITEM_BYTES = {DType.float32: 4, DType.bfloat16: 2, DType.float16: 2}


def machine_of(config: MachineConfig, dtype: DType = DType.auto) -> Machine:
    """The machine that the profile describes, for one compute dtype. `auto` as in a run of a checkpoint in bfloat16.
    Raises ConfigError where the config holds no profile, or not this dtype."""
    if dtype is DType.auto:
        has_device = config.rates is None or config.rates.device_memory_gib is not None
        dtype = auto_dtype(DType.bfloat16, has_device=has_device, has_bfloat16=has_bfloat16_units(config))
    links = config.links or LinksConfig()
    if config.sheet is not None:
        return _of_sheet(config.name, config.sheet, links, dtype)
    if config.rates is not None:
        found = _of_measured(config.name, config.rates, dtype, has_bfloat16=has_bfloat16_units(config))
        return replace(found, fabric=_measured_fabric(found, links))
    raise ConfigError(
        f"machine={config.name} says nothing of how fast it is: choose a profile such as machine=l4, "
        "or measure this one: python -m jobs.measure"
    )


def _of_sheet(name: str, sheet: DataSheet, links: LinksConfig, dtype: DType) -> Machine:
    """One device beside the whole host, as far as the host's memory feeds it."""
    flops = _tflops(sheet, dtype) * TERA * min(1.0, sheet.base_clock_mhz / sheet.boost_clock_mhz)
    memory = sheet.memory_gb_per_second * GIGA * MEMORY_SHARE
    host = sheet.host_memory_gb_per_second * GIGA * MEMORY_SHARE
    link = min(sheet.host_link_gb_per_second * GIGA * LINK_SHARE, host)
    own = links.device_gb_per_second or sheet.host_link_gb_per_second
    return Machine(
        name=name,
        fabric=Fabric(
            num_devices=sheet.num_devices,
            num_nodes=links.num_nodes,
            device=links.device,
            device_bytes_per_second=own * GIGA * LINK_SHARE,
            host_bytes_per_second=host,
            node_bytes_per_second=_network(links),
        ),
        has_bfloat16=sheet.bfloat16_tflops is not None,
        host_bytes=int(gib_to_bytes(sheet.host_memory_gib) * PINNED_SHARE),
        device_bytes=int(gib_to_bytes(sheet.memory_gib) * USABLE_SHARE),
        library_bytes=LIBRARY_BYTES,
        rates=MachineRates(
            disk_bytes_per_second=sheet.disk_gb_per_second * GIGA * DISK_SHARE,
            gemm_flops_per_second=_roofline(flops * COMPUTE_SHARE, memory, ITEM_BYTES[dtype]),
            link_in_bytes_per_second=link,
            link_out_bytes_per_second=link,
            memory_bytes_per_second=memory,
            attention_bytes_per_second=memory / DECODE_ATTENTION_TRIPS,
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


def _network(links: LinksConfig) -> float:
    return UNLIMITED if links.node_gb_per_second is None else links.node_gb_per_second * GIGA * NODE_LINK_SHARE


def _tflops(sheet: DataSheet, dtype: DType) -> float:
    if dtype is DType.float16:
        return sheet.float16_tflops
    is_narrow = dtype is DType.bfloat16 and sheet.bfloat16_tflops is not None
    return sheet.bfloat16_tflops if is_narrow and sheet.bfloat16_tflops is not None else sheet.float32_tflops


def _roofline(flops: float, memory_bytes: float, item_bytes: int) -> dict[int, float]:
    """A product of M rows takes the longer of its FLOPs and its weights' bytes, 2 M FLOPs for each number. So one point
    says it all: below the M where both take as long, rates are proportional to M (see `MachineRates.gemm_rate`)."""
    return {max(1, round(flops * item_bytes / (2 * memory_bytes))): flops}


def _of_measured(name: str, rates: MeasuredRates, dtype: DType, *, has_bfloat16: bool) -> Machine:
    found = rates.dtypes.get(dtype.value)
    if found is None:
        known = ", ".join(rates.dtypes) or "none"
        raise ConfigError(f"machine={name} was not measured for {dtype.value}, only for: {known}; set model.dtype")
    device = rates.device_memory_gib
    memory = rates.memory_gb_per_second * GIGA
    gemm = zip(rates.gemm_rows, found.gemm_gflops, strict=False)  # the largest may be missing
    return Machine(
        name=name,
        has_bfloat16=has_bfloat16,
        host_bytes=gib_to_bytes(rates.host_memory_gib),
        device_bytes=None if device is None else gib_to_bytes(device),
        library_bytes=0 if device is None else LIBRARY_BYTES,
        rates=MachineRates(
            disk_bytes_per_second=rates.disk_gb_per_second * GIGA,
            gemm_flops_per_second={num_rows: gflops * GIGA for num_rows, gflops in gemm},
            link_in_bytes_per_second=_link(rates.link_in_gb_per_second),
            link_out_bytes_per_second=_link(rates.link_out_gb_per_second),
            memory_bytes_per_second=memory,
            attention_bytes_per_second=found.attention_gb_per_second * GIGA,
            cpu_attention_bytes_per_second=found.cpu_attention_gb_per_second * GIGA,
            prefill_attention_flops_per_second=found.prefill_attention_gflops * GIGA,
            dequantize_bytes_per_second=UNLIMITED if device is None else memory * DEQUANTIZE_SHARE,
            launch_seconds=0.0 if device is None else LAUNCH_SECONDS,
            turn_seconds=rates.turn_seconds,
            hit_seconds=0.0 if device is None else HIT_SECONDS,
            pass_seconds=rates.pass_seconds,
        ),
    )


def _measured_fabric(machine: Machine, links: LinksConfig) -> Fabric:
    """The links around what was measured: of one device, or of a host that computes itself."""
    own, has_device = links.device_gb_per_second, machine.device_bytes is not None
    return Fabric(
        num_nodes=links.num_nodes,
        device=links.device if has_device else None,
        device_bytes_per_second=own * GIGA * LINK_SHARE if own else machine.rates.link_in_bytes_per_second,
        node_bytes_per_second=_network(links),
    )


def _link(gb_per_second: float | None) -> float:
    return UNLIMITED if gb_per_second is None else gb_per_second * GIGA
