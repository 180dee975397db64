"""What `jobs.measure` found of this host, kept in the user's cache directory. Loads no torch."""

import hashlib
import json
import logging
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..cache_root import cache_root
from ..errors import ConfigError
from ..profiles import BackendTable, DTypeRates, LinearBackend, MeasuredRates

log = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")
COMPARED = [multiplier.value for multiplier in LinearBackend]


@dataclass(frozen=True, kw_only=True)
class Host:
    """What rates hold for: another of any of these is another machine."""

    hostname: str
    cpu: str
    device: str  # "cpu" where compute is in host memory
    torch: str
    num_threads: int

    def answers_to(self, device: str) -> bool:
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


def this_host(device: str, num_threads: int) -> Host:
    return Host(
        hostname=platform.node(), cpu=_cpu_model(), device=device, torch=version("torch"), num_threads=num_threads
    )


def keep(host: Host, rates: MeasuredRates, products: BackendTable | None = None) -> None:
    """Replaces what was kept. Raises OSError."""
    host.path.parent.mkdir(parents=True, exist_ok=True)
    temp = host.path.with_name(f".{host.path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    values = {"host": asdict(host), "rates": asdict(rates), "products": products and _plain(products)}
    temp.write_text(json.dumps(values, indent=1) + "\n")
    temp.replace(host.path)


def find_latest(device: str = "auto") -> MeasuredRates | None:
    """The rates of this host, with whatever torch and threads it was measured last, and of the kind of device that
    `machine.device` names. What cannot be read is named in a warning and counts as nothing."""
    here = (platform.node(), _cpu_model())
    paths = sorted((cache_root() / "machine").glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    found = (kept for path in paths if (kept := _read(path)) is not None)
    mine = (kept for kept in found if (kept.host.hostname, kept.host.cpu) == here and kept.host.answers_to(device))
    return next((kept.rates for kept in mine), None)


def find_products(host: Host) -> BackendTable | None:
    """The fastest ways of exactly this host: with another torch or number of threads another multiplier may be the
    fastest."""
    kept = _read(host.path) if host.path.exists() else None
    return kept.products if kept is not None else None


@dataclass(frozen=True, kw_only=True)
class _Kept:
    host: Host
    rates: MeasuredRates
    products: BackendTable | None


def _read(path: Path) -> _Kept | None:
    try:
        values = json.loads(path.read_text())
        products = values.get("products")  # of the CPU alone
        return _Kept(
            host=Host(**values["host"]),
            rates=_rates_of(values["rates"]),
            products=_products_of(products) if products is not None else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        log.warning("%s cannot be used and is passed over: %s; python -m jobs.measure writes it anew", path, error)
        return None


def _rates_of(values: Mapping[str, object]) -> MeasuredRates:
    """Raises TypeError or ConfigError for what is no such thing."""
    parts = {name: DTypeRates(**value) if isinstance(value, dict) else value for name, value in dict(values).items()}
    return MeasuredRates(**parts)  # pyright: ignore[reportArgumentType] - checked by the class, as far as it matters


def _plain(products: BackendTable) -> dict[str, object]:
    by_kind = {kind: [multiplier.value for multiplier in found] for kind, found in products.multipliers.items()}
    return {"rows": products.rows, "multipliers": by_kind, "compared": COMPARED}


def _products_of(values: Mapping[str, Any]) -> BackendTable:
    """Raises KeyError, TypeError, ValueError or ConfigError for what is no such thing."""
    if values["compared"] != COMPARED:
        raise ConfigError(f"it compares {', '.join(values['compared'])}, while there are {', '.join(COMPARED)}")
    by_kind = {kind: [LinearBackend(name) for name in found] for kind, found in values["multipliers"].items()}
    return BackendTable(rows=list(values["rows"]), multipliers=by_kind)


def _cpu_model() -> str:
    for line in CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
