"""Feedback from the first block of a run with a searched policy: corrects the machine rates and may change the policy
of the remaining blocks.

`rates.json` keeps the rates and policy of the plan, and the corrected rates once known. A run resumed on the same host
with the same tiers measures and searches nothing, and continues like an uninterrupted one.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from runtime.errors import DamagedRunError
from runtime.library.api import Runtime
from runtime.plan.cost.calibration import correct_rates
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.experts import Routing
from runtime.plan.planner import RunPlan
from runtime.plan.search.policy import Policy
from runtime.resources import Resource
from runtime.sequences.sequence import Request

from ..files.publishing import JsonValue, read_json, write_json
from ..record.passes import PassRow

log = logging.getLogger(__name__)
Plain = TypeVar("Plain")


@dataclass(kw_only=True)
class Feedback:
    """Feedback state of a run in waves with a searched policy. `policy`: the one in use, None before planning."""

    path: Path
    runtime: Runtime
    requests: Sequence[Request]
    policy: Policy | None = field(default=None, init=False)
    routing: Routing | None = field(default=None, init=False)  # hits of experts in the first block; not recorded
    _measured_rates: MachineRates | None = field(default=None, init=False)  # from before the first block
    _corrected_rates: MachineRates | None = field(default=None, init=False)

    def restore(self) -> None:
        """Loads the recorded rates and policy if they were recorded on this host with these settings. Raises
        DamagedRunError."""
        if not self.path.exists():
            return
        values = read_json(self.path)
        if any(values.get(key) != value for key, value in self._validity_key().items()):
            log.warning(
                "%s was recorded on another host or with other settings of offload, kv or prefetch: "
                "measuring rates and searching the policy again",
                self.path,
            )
            return
        corrected_values = values.get("corrected")
        self._measured_rates = self._parse("rates", values.get("rates"), MachineRates.from_plain)
        if corrected_values is not None:
            self._corrected_rates = self._parse("rates", corrected_values, MachineRates.from_plain)
        self.policy = self._parse("policy", values.get("policy"), Policy.from_plain)

    @property
    def rates(self) -> MachineRates | None:
        """The corrected or the measured rates; None if not measured yet."""
        return self._corrected_rates or self._measured_rates

    def record(self, plan: RunPlan) -> None:
        """Saves the rates and policy of `plan` before the first block runs. Raises OutputError."""
        self._measured_rates, self.policy = plan.rates, plan.searched_policy
        self._write()

    @property
    def is_pending(self) -> bool:
        """True if the first block was predicted and its measured times have not been used yet."""
        return self._measured_rates is not None and self._corrected_rates is None

    def revise_plan(self, plan: RunPlan, passes: Sequence[PassRow], routing: Routing | None) -> RunPlan:
        """The plan of the remaining blocks, given the passes and routing of the first block under `plan`. Raises
        OutputError."""
        assert self._measured_rates is not None, "record() was called"
        self.routing = routing
        busy, predicted_busy = busy_seconds(passes)
        self._corrected_rates = correct_rates(self._measured_rates, busy, predicted_busy)
        for resource in [resource for resource in busy if busy[resource] and predicted_busy[resource]]:
            log.debug(
                "policy: in the first block %s was busy for %.3g s; %.3g s were predicted",
                resource.value,
                busy[resource],
                predicted_busy[resource],
            )
        revised = self.runtime.revised(plan, self.requests, self._corrected_rates, routing)
        self.policy = revised.searched_policy
        self._write()
        return revised

    def _validity_key(self) -> Mapping[str, JsonValue]:
        """The host and settings for which rates and policy are valid."""
        config = self.runtime.config
        return {
            "host": asdict(self.runtime.host),
            "settings": f"{config.offload} {config.kv} {config.prefetch}",
        }

    def _parse(self, name: str, values: object, read: Callable[[Any], Plain]) -> Plain:
        try:
            return read(values)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRunError(f"{self.path} has no valid {name}: {error!r}. Remove it to measure again") from error

    def _write(self) -> None:
        assert self._measured_rates is not None, "the run was planned with rates"
        assert self.policy is not None, "the run was planned by a search"
        values = {
            **self._validity_key(),
            "rates": self._measured_rates.to_plain(),
            "corrected": self._corrected_rates.to_plain() if self._corrected_rates is not None else None,
            "policy": self.policy.to_plain(),
        }
        write_json(self.path, values, exclusive=False)  # pyright: ignore[reportArgumentType] - plain JSON values


def busy_seconds(passes: Sequence[PassRow]) -> tuple[dict[Resource, float], dict[Resource, float]]:
    """Busy seconds of each resource in these passes, measured and predicted. Attention counts in decode passes only; in
    prefill it is part of compute. Passes record one copy time, the sum of both directions, so that both directions
    have this time here."""

    def sum_seconds(prefix: str) -> dict[Resource, float]:
        def total(name: str, rows: Sequence[PassRow] = passes) -> float:
            return sum(getattr(row, f"{prefix}{name}_seconds") or 0.0 for row in rows)

        copied = total("copy")
        return {
            Resource.disk: total("load"),
            Resource.host_to_device: copied,
            Resource.device_to_host: copied,
            Resource.compute: total("compute"),
            Resource.cpu_attention: total("attention", [row for row in passes if row.phase == "decode"]),
        }

    return sum_seconds(""), sum_seconds("predicted_")
