"""A host budget is held to: more than it is memory that has run out, and a policy that may backs off once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from runtime import OffloadConfig, PolicyConfig, Runtime, RuntimeConfig
from runtime.config.settings import PolicyKind, Tier
from runtime.errors import BudgetError
from runtime.out_of_memory import plan_memory_error
from runtime.planning import budgets
from runtime.sequences.sequence import Request
from runtime.stream.host_memory import peak_resident_bytes
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
        with caplog.at_level(logging.WARNING), runtime.open_with_backoff(requests) as (plan, _):
            assert plan.lane_size * plan.num_lanes == 4
    assert "trying again with half as many sequences per block" in caplog.text


def test_a_run_that_passes_its_budget_twice_is_refused_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        runtime_with(monkeypatch, PolicyKind.auto, [MIB, MIB]) as runtime,
        pytest.raises(BudgetError, match=r"the plan uses more than estimated: raise offload\.host_memory_gib"),
        runtime.open_with_backoff(requests_of(runtime)),
    ):
        pass


def test_what_a_process_holds_before_a_session_is_not_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as kernels that were compiled in this start, and what the self-check read and let go of."""
    policy, offload = PolicyConfig(kind=PolicyKind.auto), OffloadConfig(tier=Tier.none, host_memory_gib=1.0)
    roomy = Runtime(RuntimeConfig(offload=offload, policy=policy))
    needed = roomy.plan(requests_of(roomy)).placement.ledgers[-1].total_bytes
    tight = Runtime(RuntimeConfig(offload=replace(offload, host_memory_gib=1.05 * needed / GIB), policy=policy))
    held = list[bytes]()

    def check(*_: object) -> None:
        held.append(b"x" * (needed + 64 * MIB))
        assert [b"x" * (needed // 1000) for _ in range(2000)], "in the heap, and free again"

    monkeypatch.setattr(tight, "_check_lanes", check)
    with tight.open_with_backoff(requests_of(tight)) as (plan, session):
        assert len(list(session.generate(requests_of(tight)))) == 8
        used = peak_resident_bytes() - tight.baseline_bytes
    assert len(held) == 1, "the first try was within the budget"
    assert 0 <= used <= plan.placement.ledgers[-1].total_bytes


def test_memory_that_the_machine_does_not_give_is_not_answered_by_a_larger_budget() -> None:
    roomy = Runtime(RuntimeConfig(offload=OffloadConfig(tier=Tier.none, host_memory_gib=1.0)))
    ledgers = roomy.plan(requests_of(roomy)).placement.ledgers
    assert "lower offload.host_memory_gib or policy.micro_batch_size" in str(
        plan_memory_error(ledgers, MemoryError("full"))
    )
