"""Curves of a run: its passes, summed up over short intervals."""

from ..record.passes import PASS_SECONDS, PassRow, without_stages
from ..record.summary import BusyShares, RunTimes

SECONDS_PER_POINT = 10.0


class Curves:
    """Sums up passes. `num_rows`, `num_done`, `num_errors`: rows of the run, planned and done, and the bad ones among
    these; the caller keeps them up to date."""

    def __init__(self) -> None:
        self.num_rows = self.num_done = self.num_errors = 0
        self._num_passes = self._prompt_tokens = self._generated_tokens = 0
        self._passes: list[PassRow] = []  # since the last point
        self._last_at: float | None = None

    def add(self, row: PassRow) -> None:
        self._passes.append(without_stages(row))
        self._num_passes += 1
        self._prompt_tokens += row.prompt_tokens
        self._generated_tokens += row.useful_tokens

    def is_due(self, at: float) -> bool:
        """True if a point should be taken at second `at`; the first is due after an interval."""
        if self._last_at is None:
            self._last_at = at
        return bool(self._passes) and at - self._last_at >= SECONDS_PER_POINT

    def take_point(self, at: float) -> dict[str, float]:
        """Values at second `at`, rates and shares over the passes since the last point. Rates of a phase without passes
        are left out."""
        passes, self._passes, self._last_at = self._passes, [], at
        times = RunTimes.from_passes(passes, PASS_SECONDS)
        rates, busy = times.rates(passes), BusyShares.from_times(times.prefill.add(times.decode))
        values: dict[str, float | None] = {
            "progress/rows_done": self.num_done,
            "progress/rows_planned": self.num_rows,
            "progress/rows_error": self.num_errors,
            "progress/passes": self._num_passes,
            "progress/prompt_tokens": self._prompt_tokens,
            "progress/generated_tokens": self._generated_tokens,
            "throughput/prefill_tokens_per_second": rates.prefill or None,
            "throughput/decode_tokens_per_second": rates.decode_useful or None,
        }
        if busy is not None:
            values |= {"busy/disk": busy.disk, "busy/link": busy.link, "busy/compute": busy.compute}
        if passes:
            values |= {"memory/host_bytes": passes[-1].host_bytes, "memory/device_bytes": passes[-1].device_bytes}
        return {name: float(value) for name, value in values.items() if value is not None}
