"""Machine profiles: peak rates from a data sheet, or rates measured by `jobs.measure`.

GB and TFLOP are powers of ten, as in data sheets; GiB are powers of two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from math import log2
from typing import Any

from ..errors import require
from .texts import TextField, enum_field

SHEET_LANES = 16  # PCIe lanes that the link bandwidth of data sheets assumes
LANES = (1, 2, 4, 8, SHEET_LANES)


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """The vendor's peak rates for one device, and for its host with `num_devices` devices.
    `runtime/plan/cost/machine.py` estimates which fraction of a peak is attained.

    FLOP rates are those at the boost clock; under a power limit the device may run at the base clock. `link_lanes`:
    PCIe lanes, the smaller number of card and slot; the link bandwidth is scaled by `link_lanes / 16`.
    `bfloat16_tflops`: None without bfloat16 units; the rate of float32 is then used."""

    num_devices: int = 1
    memory_gib: float
    memory_gb_per_second: float
    link_gb_per_second: float  # in one direction, over sixteen lanes
    link_lanes: int = SHEET_LANES
    base_clock_mhz: float
    boost_clock_mhz: float
    float32_tflops: float
    float16_tflops: float  # of dense matrices, with sums in float32
    bfloat16_tflops: float | None
    host_memory_gib: float
    host_memory_gb_per_second: float
    host_num_cores: int
    disk_gb_per_second: float

    def __post_init__(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            require(value is None or value > 0, f"machine.sheet.{field_.name} must be above 0, got {value}")
        lanes = self.link_lanes
        require(lanes in LANES, f"machine.sheet.link_lanes must be one of {', '.join(map(str, LANES))}, got {lanes}")

    @property
    def host_link_gb_per_second(self) -> float:
        """Bandwidth of the link to the host in one direction, with its actual number of lanes."""
        return self.link_gb_per_second * self.link_lanes / SHEET_LANES


class DeviceLink(Enum):
    """The connection between devices of one host. `host`: through host memory; `pcie`: peer to peer over the links to
    the host; `nvlink`: over separate links."""

    host = "host"
    pcie = "pcie"
    nvlink = "nvlink"


@dataclass(frozen=True, kw_only=True)
class LinksConfig:
    """Links between the devices of one host, and between `num_nodes` identical hosts. Bandwidths are those of one link
    in one direction. If `device_gb_per_second` is None, it is the bandwidth of the links to the host."""

    num_nodes: int = 1
    device: TextField[DeviceLink] = enum_field(DeviceLink.host)
    device_gb_per_second: float | None = None
    node_gb_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_nodes", "device_gb_per_second", "node_gb_per_second"):
            value = getattr(self, name)
            require(value is None or value > 0, f"machine.links.{name} must be above 0, got {value}")
        require(
            self.device is not DeviceLink.nvlink or self.device_gb_per_second is not None,
            "machine.links.device=nvlink needs a bandwidth: set machine.links.device_gb_per_second",
        )
        require(
            self.num_nodes == 1 or self.node_gb_per_second is not None,
            f"machine.links.num_nodes={self.num_nodes} needs a network bandwidth: set "
            "machine.links.node_gb_per_second, 1.25 for 10 GbE",
        )


@dataclass(frozen=True, kw_only=True)
class DTypeRates:
    """Rates for one compute dtype. `gemm_gflops`: rates of matrix products with the row counts of
    `MeasuredRates.gemm_rows`; if there are fewer, the last rate is used for larger products. `attention_gb_per_second`
    and `cpu_attention_gb_per_second`: bytes of KV in this dtype that decode attention reads."""

    gemm_gflops: list[float]
    attention_gb_per_second: float
    cpu_attention_gb_per_second: float
    prefill_attention_gflops: float

    def __post_init__(self) -> None:
        require(bool(self.gemm_gflops), "machine.rates: gemm_gflops is empty")
        rates = (*self.gemm_gflops, *(value for value in vars(self).values() if isinstance(value, float)))
        require(all(rate > 0 for rate in rates), f"machine.rates: every rate must be above 0, got {min(rates)}")


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """Rates measured by `jobs.measure`. `device_memory_gib` and the link rates are None without an accelerator. A dtype
    that was not measured is None. Memory sizes are what a run may use. `turn_seconds`, `pass_seconds`: overheads per
    turn (one micro-batch in one layer) and per pass."""

    host_memory_gib: float
    device_memory_gib: float | None = None
    disk_gb_per_second: float  # of long reads
    link_in_gb_per_second: float | None = None
    link_out_gb_per_second: float | None = None
    memory_gb_per_second: float  # of the compute device, read and written
    turn_seconds: float
    pass_seconds: float
    gemm_rows: list[int] = field(default_factory=list)
    float32: DTypeRates | None = None
    bfloat16: DTypeRates | None = None
    float16: DTypeRates | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float):
                is_overhead = name in ("turn_seconds", "pass_seconds")  # may be 0: below the clock's resolution
                require(value > 0 or is_overhead, f"machine.rates.{name} must be above 0, got {value}")
                require(value >= 0, f"machine.rates.{name} must be 0 or more, got {value}")
        rows = self.gemm_rows
        _require_ascending("machine.rates.gemm_rows", rows)
        for name, rates in self.dtypes.items():
            require(
                len(rates.gemm_gflops) <= len(rows),
                f"machine.rates.{name}.gemm_gflops has {len(rates.gemm_gflops)} rates for {len(rows)} gemm_rows",
            )

    def missing_rates_warning(self, dtype: str) -> str | None:
        """Formats a warning if `dtype` has fewer rates than `gemm_rows` has row counts, as in files of older versions;
        else None."""
        rates, rows = self.dtypes[dtype].gemm_gflops, self.gemm_rows
        if len(rates) == len(rows):
            return None
        last = rows[len(rates) - 1]
        return (
            f"machine.rates.{dtype}.gemm_gflops has {len(rates)} of {len(rows)} rates, up to M={last}: plans assume "
            f"{rates[-1]:.3g} GFLOP/s for M={', '.join(map(str, rows[len(rates) :]))} too, which may be many times too "
            "slow. Measure the machine again: python -m jobs.measure"
        )

    @property
    def dtypes(self) -> dict[str, DTypeRates]:
        rates = {"float32": self.float32, "bfloat16": self.bfloat16, "float16": self.float16}
        return {name: of_dtype for name, of_dtype in rates.items() if of_dtype is not None}


FLOAT32 = "float32"


class LinearBackend(Enum):
    """An implementation of the matrix product of inputs with stored weights, on a CPU.

    - tiles: compiled code for the CPU's matrix unit.
    - vectors: compiled code with vector instructions.
    - pairs: like `vectors`, but multiplies two bfloat16 numbers at a time.
    - widened: converts groups of weight rows (panels) to float32 in a buffer, then multiplies them.
    - weights_first, inputs_first: torch's BLAS, called as `w @ x.T` or as `x @ w.T`.
    - onednn: oneDNN."""

    tiles = "tiles"
    vectors = "vectors"
    widened = "widened"
    pairs = "pairs"
    weights_first = "weights_first"
    inputs_first = "inputs_first"
    onednn = "onednn"


@dataclass(frozen=True, kw_only=True)
class BackendTable:
    """The fastest backends of matrix products. `rows`: numbers of input rows that were measured. `multipliers`: `kind`
    of product -> the fastest backend for each entry of `rows`."""

    rows: list[int]
    multipliers: dict[str, list[LinearBackend]]

    def __post_init__(self) -> None:
        _require_ascending("rows of products", self.rows)
        wrong = [kind for kind, backends in self.multipliers.items() if len(backends) != len(self.rows)]
        require(not wrong, f"{', '.join(wrong)}: needs one backend for each of {len(self.rows)} rows of products")

    @staticmethod
    def kind(stored: str, *, is_tall: bool, inputs: str = FLOAT32) -> str:
        """Formats the kind of a product: dtype of stored weights, orientation, dtype of inputs. Tall weights have more
        input than output features."""
        weights = f"{stored}, {'tall' if is_tall else 'wide'}"
        return weights if inputs == FLOAT32 else f"{inputs} by {weights}"

    def fastest(self, stored: str, *, is_tall: bool, num_rows: int, inputs: str = FLOAT32) -> LinearBackend | None:
        """Returns the fastest backend for the measured row count that is nearest to `num_rows` by ratio; None if this
        kind of product was not measured."""
        backends = self.multipliers.get(self.kind(stored, is_tall=is_tall, inputs=inputs))
        if backends is None:
            return None
        return backends[min(range(len(self.rows)), key=lambda index: abs(log2(self.rows[index] / num_rows)))]

    def to_plain(self) -> dict[str, object]:
        """Returns a JSON-compatible form for `from_plain`."""
        by_kind = {kind: [backend.value for backend in backends] for kind, backends in self.multipliers.items()}
        return {"rows": self.rows, "multipliers": by_kind}

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> "BackendTable":
        """Inverse of `to_plain`. Raises KeyError, TypeError, ValueError, AttributeError or ConfigError."""
        by_kind = {kind: [LinearBackend(name) for name in names] for kind, names in values["multipliers"].items()}
        return BackendTable(rows=list(values["rows"]), multipliers=by_kind)


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Settings of `jobs.measure`. `times`: repetitions of all measurements, whose results are then compared."""

    out: str | None = None
    directory: str = "."
    times: int = 1
    seconds: float = 20.0
    num_rounds: int = 5
    disk_mib: int = 512
    memory_mib: int = 512
    matrix_width: int = 4096
    gemm_rows: list[int] = field(default_factory=lambda: [1, 8, 16, 64, 128, 256, 512, 1024])

    def __post_init__(self) -> None:
        require(bool(self.directory.strip()), "measure.directory is empty: use one on the disk of your checkpoints")
        require(self.out is None or self.out.endswith(".yaml"), f"measure.out must end in .yaml, got {self.out}")
        for name in ("times", "num_rounds", "disk_mib", "memory_mib"):
            require(getattr(self, name) >= 1, f"measure.{name} must be 1 or more, got {getattr(self, name)}")
        require(self.seconds > 0, f"measure.seconds must be above 0 s, got {self.seconds}")
        width = self.matrix_width
        require(width >= 256 and width % 256 == 0, f"measure.matrix_width must be a multiple of 256, got {width}")
        _require_ascending("measure.gemm_rows", self.gemm_rows)


def _require_ascending(key: str, rows: list[int]) -> None:
    is_rising = bool(rows) and rows[0] >= 1 and rows == sorted(set(rows))
    require(is_rising, f"{key} must be ascending whole numbers from 1, got {rows}")


DEFAULT_BACKENDS = BackendTable(rows=[1], multipliers={})  # not measured: `default_backend` applies
