"""What `jobs.measure`, and runs before it, found of this host, kept in the user's cache directory. Loads no torch."""

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
from ..kernels.arguments import ISA

log = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")
COMPARED = [multiplier.value for multiplier in LinearBackend]
ISAS = {"amx": "amx_tile", "avx512": "avx512f", "avx2": "avx2"}  # by the flags of Linux, the widest first


@dataclass(frozen=True, kw_only=True)
class Host:
    """What rates hold for: another of any of these is another machine."""

    hostname: str
    cpu: str
    device: str  # "cpu" where compute is in host memory
    torch: str
    num_threads: int
    numba: str = ""  # its version; none where it is not installed
    isa: str = ""  # the instruction set that the CPU's kernels are made for

    def matches_device(self, device: str) -> bool:
        """`machine.device`: auto is any."""
        return device == "auto" or (device == "cpu") == (self.device == "cpu")

    @property
    def kind(self) -> str:
        """What it answers to."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_root() / "machine" / f"{digest[:16]}.json"


@dataclass(frozen=True, kw_only=True)
class BackendComparison:
    """The linear backends of one kind of product at so many rows, as a run compared them in passing: the GFLOP/s of
    each in its best round so far. `num_times`: how many runs did; `doubt`: why another is to do so again; None: settled
    until `jobs.measure`. `conditions`: of the last time, for a reader of the file."""

    gflops: dict[str, float]
    num_times: int
    doubt: str | None
    conditions: dict[str, object]

    def __str__(self) -> str:
        rates = sorted(self.gflops.items(), key=lambda rate: -rate[1])
        doubt = "" if self.doubt is None else f"; in doubt, as {self.doubt}"
        return ", ".join(f"{name} {rate:.0f}" for name, rate in rates) + f" GFLOP/s{doubt}"

    def winner(self, usual: str, worthwhile: float) -> str:
        """The backend to take where the rule takes `usual`: another if it is faster by the share `worthwhile`. What one
        run alone has found and doubts changes nothing."""
        if usual not in self.gflops or (self.doubt is not None and self.num_times < 2):
            return usual
        best = max(self.gflops, key=lambda name: self.gflops[name])
        return best if self.gflops[best] > (1 + worthwhile) * self.gflops[usual] else usual


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
    """The instruction set that kernels are made for: the one that WEIGHTSTREAM_ISA names, or the widest that the CPU
    has; empty where none of these is known."""
    flags = cpu_flags()
    widest = next((name for name, flag in ISAS.items() if flag in flags), "")
    return os.environ.get(ISA) or widest


def cpu_flags() -> frozenset[str]:
    """What Linux says that the first processor has; nothing elsewhere."""
    return frozenset(_cpu_info("flags").split())


def save_rates(host: Host, rates: MeasuredRates, products: BackendTable | None = None) -> None:
    """Replaces what was kept, contests too. Raises OSError."""
    _write(_HostRecord(host=host, rates=rates, products=products))


def save_comparisons(host: Host, kernels: str, found: Mapping[str, BackendComparison]) -> None:
    """Puts them, by the names of their products, beside what was kept of the host; `kernels` is the digest of the code
    that they compared. Of two processes that do so at once, one may be forgotten: the next run measures that again.
    Raises OSError."""
    kept = _read(host.path) if host.path.exists() else None
    _write(replace(kept or _HostRecord(host=host), kernels=kernels, contests=found))


def _write(kept: "_HostRecord") -> None:
    path = kept.host.path
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    products = None if kept.products is None else {**kept.products.to_plain(), "compared": COMPARED}
    contests = {name: asdict(contest) for name, contest in kept.comparisons.items()}
    values = {
        "host": asdict(kept.host),
        "rates": kept.rates and asdict(kept.rates),
        "products": products,
        "contests": None if kept.kernels is None else {"kernels": kept.kernels, "found": contests},
    }
    temp.write_text(json.dumps(values, indent=1) + "\n")
    temp.replace(path)


def find_latest_rates(device: str = "auto") -> MeasuredRates | None:
    """The rates of this host, with whatever torch and threads it was measured last, and of the kind of device that
    `machine.device` names. What cannot be read is named in a warning and counts as nothing."""
    here = (platform.node(), _cpu_model())
    paths = sorted((cache_root() / "machine").glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    found = (kept for path in paths if (kept := _read(path)) is not None)
    mine = (kept for kept in found if (kept.host.hostname, kept.host.cpu) == here and kept.host.matches_device(device))
    return next((kept.rates for kept in mine if kept.rates is not None), None)


def find_products(host: Host) -> BackendTable | None:
    """The fastest ways of exactly this host: with another torch or number of threads another multiplier may be the
    fastest."""
    kept = _read(host.path) if host.path.exists() else None
    return kept.products if kept is not None else None


def find_comparisons(host: Host, kernels: str) -> dict[str, BackendComparison]:
    """What runs on exactly this host compared of exactly these kernels, by the names of products."""
    kept = _read(host.path) if host.path.exists() else None
    return {**kept.comparisons} if kept is not None and kept.kernels == kernels else {}


@dataclass(frozen=True, kw_only=True)
class _HostRecord:
    """What a file holds. `kernels`: the digest of the code that `contests` compared; None where no run has compared
    any."""

    host: Host
    rates: MeasuredRates | None = None
    products: BackendTable | None = None
    kernels: str | None = None
    comparisons: Mapping[str, BackendComparison] = field(default_factory=dict)


def _read(path: Path) -> _HostRecord | None:
    try:
        values = json.loads(path.read_text())
        found = _HostRecord(host=Host(**values["host"]))
        if (rates := values["rates"]) is not None:
            parts = {key: DTypeRates(**value) if isinstance(value, dict) else value for key, value in rates.items()}
            rates = MeasuredRates(**parts)  # pyright: ignore[reportArgumentType] - checked by the class
            found = replace(found, rates=rates)
        if (products := values.get("products")) is not None:
            if products["compared"] != COMPARED:
                known = ", ".join(products["compared"])
                raise ConfigError(f"it compares {known}, while there are {', '.join(COMPARED)}")
            found = replace(found, products=BackendTable.from_plain(products))
        if (contests := values.get("contests")) is not None:
            each = {name: BackendComparison(**contest) for name, contest in contests["found"].items()}
            for rate in (rate for contest in each.values() for rate in contest.gflops.items()):
                if rate[0] not in COMPARED or not isinstance(rate[1], float) or rate[1] <= 0:
                    raise ValueError(f"{rate} is no backend with its GFLOP/s")
            found = replace(found, kernels=contests["kernels"], contests=each)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        log.warning("%s cannot be used and is passed over: %s; python -m jobs.measure writes it anew", path, error)
        return None


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(wanted: str) -> str:
    """What Linux says of the first processor; empty elsewhere."""
    for line in CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() == wanted:
            return value.strip()
    return ""
