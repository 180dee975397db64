"""What a run of `policy=hrm` learns from its first block: its rates, corrected, and with them perhaps another way for
the blocks that are left.

`rates.json` keeps the rates that the run was planned with, and the corrected ones once there are any: a run that goes
on on the same host measures nothing. It searches anew, though: where the first start took a kept policy or halved its
blocks, it may go another way than a run that was never stopped.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from runtime.api import Runtime
from runtime.engine.sequence import Request
from runtime.errors import DamagedRunError
from runtime.plan.correct import corrected
from runtime.plan.cost import Resource
from runtime.plan.planner import RunPlan
from runtime.plan.rates import MachineRates

from .files import read_json, write_json
from .summary import PassRow

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Feedback:
    """Of a run in waves whose policy is searched."""

    path: Path
    runtime: Runtime
    requests: Sequence[Request]
    _corrected: MachineRates | None = field(default=None, init=False)
    _is_at_home: bool = field(default=True, init=False)

    def restore(self) -> None:
        """Takes up what was recorded. Of another host it is no use: nothing is corrected then.

        Raises DamagedRunError."""
        if not self.path.exists():
            return
        values = read_json(self.path)
        self._is_at_home = values.get("host") == asdict(self.runtime.host)
        if not self._is_at_home:
            log.warning("policy=hrm: %s was measured on another host; rates are measured anew and stay", self.path)
            return
        self.runtime.rates = self._rates(values.get("rates"))
        self._corrected = self._rates(values["corrected"]) if values.get("corrected") is not None else None

    def record(self) -> None:
        """Before the first block. Raises OutputError."""
        if self._is_at_home and not self.path.exists():
            self._write()

    @property
    def is_due(self) -> bool:
        """A block has ended and nothing was learned from it."""
        return self._is_at_home and self._corrected is None

    def learn(self, plan: RunPlan, passes: Sequence[PassRow]) -> bool:
        """From the first block's, which went `plan`'s way: whether those that are left had better go another. Raises
        OutputError."""
        assert self.runtime.rates is not None, "the run was planned with rates"
        measured, predicted = worked(passes)
        self._corrected = corrected(self.runtime.rates, measured, predicted)
        self._write()
        for resource in (each for each in Resource if measured[each] and predicted[each]):
            log.info(
                "policy=hrm: the first block kept %s busy for %.3g s where %.3g s were predicted",
                resource.value,
                measured[resource],
                predicted[resource],
            )
        better = self.revise(plan)
        if is_another := (better.policy, better.kv) != (plan.policy, plan.kv):
            way = better.policy
            log.info("policy=hrm: from now on %s, attention on %s", way.schedule.value, way.attention.value)
        return is_another

    def revise(self, plan: RunPlan) -> RunPlan:
        """`plan`, or where something was learned what it becomes by it."""
        if self._corrected is None:
            return plan
        return self.runtime.revised(plan, self.requests, self._corrected)

    def _rates(self, values: object) -> MachineRates:
        try:
            return MachineRates.from_plain(values)  # pyright: ignore[reportArgumentType] - refused by it, if no mapping
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRunError(f"{self.path} holds no rates: {error!r}. Move it away to measure anew") from error

    def _write(self) -> None:
        rates, better = self.runtime.rates, self._corrected
        assert rates is not None, "the run was planned with rates"
        values = {
            "host": asdict(self.runtime.host),
            "rates": rates.to_plain(),
            "corrected": better.to_plain() if better is not None else None,
        }
        write_json(self.path, values, exclusive=False)  # pyright: ignore[reportArgumentType] - plain all through


def worked(passes: Sequence[PassRow]) -> tuple[dict[Resource, float], dict[Resource, float]]:
    """Seconds that each resource worked in these passes, measured and predicted. Attention counts where single tokens
    are decoded: that of prompts is compute's."""

    def added(prefix: str) -> dict[Resource, float]:
        def total(name: str, rows: Sequence[PassRow] = passes) -> float:
            return sum(getattr(row, f"{prefix}{name}_seconds") or 0.0 for row in rows)

        copied = total("copy")
        return {
            Resource.disk: total("load"),
            Resource.link_in: copied,
            Resource.link_out: copied,
            Resource.compute: total("compute"),
            Resource.cpu: total("attention", [row for row in passes if row.phase == "decode"]),
        }

    return added(""), added("predicted_")
