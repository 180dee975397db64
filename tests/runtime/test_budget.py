"""A host budget is held to: more than it is memory that has run out, and a policy that may backs off once."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime import OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, budgets
from runtime.config import PolicyKind, Tier
from runtime.engine.sequence import Request
from runtime.errors import BudgetError
from runtime.units import GIB, MIB


@contextmanager
def runtime_with(monkeypatch: pytest.MonkeyPatch, kind: PolicyKind, peaks: list[int]) -> Iterator[Runtime]:
    """A budget of 1 GiB; `peaks` are what the process is found to have used beyond it, time after time."""
    config = RuntimeConfig(
        offload=OffloadConfig(tier=Tier.none, host_memory_gib=1.0),
        policy=PolicyConfig(kind=kind, micro_batch_size=8, num_micro_batches=1),
    )
    runtime = Runtime(config)
    left = iter(peaks)
    monkeypatch.setattr(budgets, "peak_resident_bytes", lambda _: runtime.baseline_bytes + GIB + next(left))
    yield runtime


def requests_of(runtime: Runtime) -> list[Request]:
    made = [runtime.request(str(index), [5, 6, 7]) for index in range(8)]
    return [request for request in made if isinstance(request, Request)]


@pytest.mark.parametrize(("beyond", "is_too_much"), [(-1, False), (0, False), (1, True), (MIB, True)])
def test_a_byte_more_than_the_budget_is_too_much(
    beyond: int, is_too_much: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runtime_with(monkeypatch, PolicyKind.fixed, [beyond]) as runtime:
        plan = runtime.plan(requests_of(runtime))
        if not is_too_much:
            runtime.require_within_budget(plan)
            return
        said = r"1 GiB used, offload\.host_memory_gib allows 1 GiB"
        with pytest.raises(MemoryError, match=said):
            runtime.require_within_budget(plan)


def test_a_run_that_passes_its_budget_is_tried_once_more_with_half_as_many_sequences(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with runtime_with(monkeypatch, PolicyKind.auto, [MIB, -MIB]) as runtime:
        requests = requests_of(runtime)
        with caplog.at_level(logging.WARNING), runtime.confirmed_session(requests) as (plan, _):
            assert plan.lane_size * plan.num_lanes == 4
    assert "once more with blocks of half as many sequences" in caplog.text


def test_a_run_that_passes_its_budget_twice_is_refused_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        runtime_with(monkeypatch, PolicyKind.auto, [MIB, MIB]) as runtime,
        pytest.raises(BudgetError, match=re.escape("offload.host_memory_gib")),
        runtime.confirmed_session(requests_of(runtime)),
    ):
        pass
