"""Measured rates and fastest linear backends of this host, kept in the user's cache directory. Loads no torch.

A linear backend is an implementation of products with stored weights. There is one JSON file, or record, per `Host`. It
has the results of `jobs.measure` (rates, and a table of fastest backends), and the comparisons of backends that runs
made where `jobs.measure` had not been used."""

import hashlib
import json
import logging
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..cache_root import cache_root
from ..config.profiles import BackendTable, DTypeRates, LinearBackend, MeasuredRates
from ..errors import ConfigError
from ..kernels.arguments import ISA_VARIABLE

log = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")
BACKEND_NAMES = [multiplier.value for multiplier in LinearBackend]
ISAS = {"amx": "amx_tile", "avx512": "avx512f", "avx2": "avx2"}  # Linux CPU flags, the widest first


@dataclass(frozen=True, kw_only=True)
class Host:
    """The machine and software for which measured rates are valid. Rates of one host do not hold for another, if any
    field differs."""

    hostname: str
    cpu: str
    device: str  # name of the accelerator, or "cpu"
    torch: str
    num_threads: int
    numba: str = ""  # version; "" if it is not installed
    isa: str = ""  # instruction set of compiled kernels

    def matches_device(self, device: str) -> bool:
        """True if this host's rates are valid for `device`, a value of `machine.device`; "auto" matches any host."""
        return device == "auto" or (device == "cpu") == (self.device == "cpu")

    @property
    def kind(self) -> str:
        """The device kind: "cpu" or "cuda"."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def path(self) -> Path:
        """The file of this host's record."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_root() / "machine" / f"{digest[:16]}.json"


@dataclass(frozen=True, kw_only=True)
class BackendComparison:
    """A comparison of linear backends for one product. `gflops`: the rate of each backend's best round so far, by
    backend name. `num_times`: number of runs that compared them. `doubt`: the reason to repeat the comparison in the
    next run; None if it is decided. `conditions`: those of the last comparison, only for people who read the file."""

    gflops: dict[str, float]
    num_times: int
    doubt: str | None
    conditions: dict[str, object]

    def __str__(self) -> str:
        rates = sorted(self.gflops.items(), key=lambda rate: -rate[1])
        doubt = "" if self.doubt is None else f"; to be repeated, as {self.doubt}"
        return ", ".join(f"{name} {rate:.0f}" for name, rate in rates) + f" GFLOP/s{doubt}"

    def winner(self, default: str, min_gain: float) -> str:
        """The name of the fastest backend if it is faster than `default` by the share `min_gain`, otherwise `default`.
        If there is a doubt, results of a single run do not count."""
        if default not in self.gflops or (self.doubt is not None and self.num_times < 2):
            return default
        best = max(self.gflops, key=lambda name: self.gflops[name])
        return best if self.gflops[best] > (1 + min_gain) * self.gflops[default] else default


def current_host(device: str, num_threads: int) -> Host:
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = ""
    return Host(
        hostname=platform.node(),
        cpu=_cpu_model(),
        device=device,
        torch=version("torch"),
        num_threads=num_threads,
        numba=numba,
        isa=isa(),
    )


def isa() -> str:
    """The instruction set of compiled kernels: WEIGHTSTREAM_ISA, or the CPU's widest; "" if unknown."""
    flags = cpu_flags()
    widest = next((name for name, flag in ISAS.items() if flag in flags), "")
    return os.environ.get(ISA_VARIABLE) or widest


def cpu_flags() -> frozenset[str]:
    """The CPU flags that Linux reports for the first processor; empty on other systems."""
    return frozenset(_cpu_info("flags").split())


def save_rates(host: Host, rates: MeasuredRates, products: BackendTable | None = None) -> None:
    """Replaces the host's record by one without comparisons. Raises OSError if it cannot be written."""
    _write(_HostRecord(host=host, rates=rates, products=products))


def save_comparisons(host: Host, kernels: str, comparisons: Mapping[str, BackendComparison]) -> None:
    """Replaces the comparisons (by product name) in the host's record. `kernels`: digest of the compared code. Raises
    OSError if the record cannot be written."""
    # Not atomic: if two processes save at once, the results of one may be lost. The next run measures them again.
    record = _read(host.path) if host.path.exists() else None
    _write(replace(record or _HostRecord(host=host), kernels=kernels, comparisons=comparisons))


def _write(record: "_HostRecord") -> None:
    path = record.host.path
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    products = None if record.products is None else {**record.products.to_plain(), "compared": BACKEND_NAMES}
    comparisons = {name: asdict(comparison) for name, comparison in record.comparisons.items()}
    values = {
        "host": asdict(record.host),
        "rates": record.rates and asdict(record.rates),
        "products": products,
        "contests": None if record.kernels is None else {"kernels": record.kernels, "found": comparisons},
    }
    temp.write_text(json.dumps(values, indent=1) + "\n")
    temp.replace(path)  # atomic: readers never see a partial file


def find_latest_rates(device: str = "auto") -> MeasuredRates | None:
    """The newest rates of this computer for `device`, a value of `machine.device`, whatever the torch version and
    thread count. Skips unreadable files with a warning. None if there are no rates."""
    this_host = (platform.node(), _cpu_model())
    paths = sorted((cache_root() / "machine").glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    records = (record for path in paths if (record := _read(path)) is not None)
    for record in records:
        if (record.host.hostname, record.host.cpu) == this_host and record.host.matches_device(device) and record.rates:
            return record.rates
    return None


def find_products(host: Host) -> BackendTable | None:
    """The fastest backends that `jobs.measure` found for exactly this host; None if there are none."""
    record = _read(host.path) if host.path.exists() else None
    return record.products if record is not None else None


def find_comparisons(host: Host, kernels: str) -> dict[str, BackendComparison]:
    """The comparisons (by product name) of runs with exactly this host and kernel code, see `save_comparisons`."""
    record = _read(host.path) if host.path.exists() else None
    return {**record.comparisons} if record is not None and record.kernels == kernels else {}


@dataclass(frozen=True, kw_only=True)
class _HostRecord:
    """The content of a host's file. `products`: the fastest backends that `jobs.measure` found. `kernels`: digest of
    the code that `comparisons` compared; None without comparisons."""

    host: Host
    rates: MeasuredRates | None = None
    products: BackendTable | None = None
    kernels: str | None = None
    comparisons: Mapping[str, BackendComparison] = field(default_factory=dict)


def _read(path: Path) -> _HostRecord | None:
    """Reads a record. Logs a warning and returns None if the file is invalid."""
    try:
        values = json.loads(path.read_text())
        record = _HostRecord(host=Host(**values["host"]))
        if (rates := values["rates"]) is not None:
            parts = {key: DTypeRates(**value) if isinstance(value, dict) else value for key, value in rates.items()}
            rates = MeasuredRates(**parts)  # pyright: ignore[reportArgumentType] - checked by the class
            record = replace(record, rates=rates)
        if (products := values.get("products")) is not None:
            if products["compared"] != BACKEND_NAMES:
                known = ", ".join(products["compared"])
                raise ConfigError(f"compares backends {known} instead of {', '.join(BACKEND_NAMES)}")
            record = replace(record, products=BackendTable.from_plain(products))
        if (saved := values.get("contests")) is not None:
            comparisons = {name: BackendComparison(**comparison) for name, comparison in saved["found"].items()}
            rates_by_name = [rate for comparison in comparisons.values() for rate in comparison.gflops.items()]
            for name, gflops in rates_by_name:
                if name not in BACKEND_NAMES or not isinstance(gflops, float) or gflops <= 0:
                    raise ValueError(f"{(name, gflops)} is not a backend and its GFLOP/s")
            record = replace(record, kernels=saved["kernels"], comparisons=comparisons)
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        log.warning("%s: ignored: %s; run python -m jobs.measure to replace it", path, error)
        return None


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(name: str) -> str:
    """The value of field `name` that Linux reports for the first processor; "" on other systems."""
    for line in CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
