"""What policy=hrm learns from a run's first block is recorded, and the run that goes on comes to the same."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import runtime.api
from jobs.io.config import GenerateConfig
from jobs.io.dataset import DatasetConfig
from jobs.io.feedback import worked
from jobs.io.generation import Outcome, generate
from jobs.io.parts import read_generations
from jobs.io.run_dir import RunDirectory
from jobs.io.summary import PassRow
from runtime.api import Runtime
from runtime.config import OffloadConfig, Order, PolicyConfig, PolicyKind, SamplingConfig
from runtime.engine.sequence import Request
from runtime.errors import DamagedRunError, Interrupted
from runtime.plan import policy_grid
from runtime.plan.cost import Resource
from runtime.plan.planner import RunPlan, plan_run
from runtime.plan.rates import MachineRates

NUM_ROWS = 12


def config(root: Path, *, kind: PolicyKind = PolicyKind.hrm) -> GenerateConfig:
    return GenerateConfig(
        run=kind.value,
        output_root=str(root),
        dataset=DatasetConfig(limit=NUM_ROWS),
        offload=OffloadConfig(cache_dir=str(root / "cache")),
        policy=PolicyConfig(kind=kind, micro_batch_size=2, num_micro_batches=2),
        sampling=SamplingConfig(max_new_tokens=6),
    )


def run(root: Path, should_stop: Callable[[], bool] = lambda: False, *, kind: PolicyKind = PolicyKind.hrm) -> Outcome:
    return generate(config(root, kind=kind), should_stop)


def directory(root: Path, kind: PolicyKind = PolicyKind.hrm) -> RunDirectory:
    return RunDirectory(path=root / "generate" / kind.value)


def tokens(root: Path, kind: PolicyKind = PolicyKind.hrm) -> dict[str, list[int]]:
    table = read_generations(directory(root, kind))
    return dict(zip(table["id"].to_pylist(), table["token_ids"].to_pylist(), strict=True))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks at least."""
    monkeypatch.setattr(policy_grid, "MICRO_BATCHES", (1, 2))
    monkeypatch.setattr(policy_grid, "COUNTS", (1, 2))


@pytest.fixture
def another_way(monkeypatch: pytest.MonkeyPatch) -> list[MachineRates]:
    """The rates by which plans were revised: each time to go turn by turn."""
    by: list[MachineRates] = []

    def revised(self: Runtime, plan: RunPlan, requests: list[Request], rates: MachineRates) -> RunPlan:
        by.append(rates)
        way = replace(self.config, policy=replace(plan.policy, schedule=Order.flexgen))
        return plan_run(
            self.model.shape,
            way,
            self.budgets(),
            [request.size for request in requests],
            rates=rates,
            blocks=plan.blocks,
        )

    monkeypatch.setattr(Runtime, "revised", revised)
    return by


def test_the_blocks_that_are_left_go_the_better_way(tmp_path: Path, another_way: list[MachineRates]) -> None:
    outcome = run(tmp_path)
    assert outcome.summary.rows["ok"] == NUM_ROWS
    assert "sync" in directory(tmp_path).schedule.read_text()
    assert tokens(tmp_path) == tokens_of_fixed(tmp_path)
    recorded = json.loads(directory(tmp_path).rates.read_text())
    assert another_way == [MachineRates.from_plain(recorded["corrected"])] * 2
    assert MachineRates.from_plain(recorded["rates"]) != another_way[0]


def test_a_run_that_goes_on_measures_nothing_and_comes_to_the_same_way(
    tmp_path: Path, another_way: list[MachineRates], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, lambda: len(another_way) > 1)
    learned = another_way[0]
    monkeypatch.setattr(runtime.api, "measure_rates", lambda *_: pytest.fail("rates are known"))
    run(tmp_path)
    assert another_way == [learned] * 3
    assert tokens(tmp_path) == tokens_of_fixed(tmp_path, monkeypatch)


def test_a_way_that_promises_too_little_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.api, "WORTHWHILE", 1.0)
    sessions: list[RunPlan] = []
    session = Runtime.session
    monkeypatch.setattr(Runtime, "session", lambda self, plan: sessions.append(plan) or session(self, plan))
    run(tmp_path)
    assert len(sessions) == 1
    assert json.loads(directory(tmp_path).rates.read_text())["corrected"] is not None


def test_rates_of_another_host_are_no_use(
    tmp_path: Path, another_way: list[MachineRates], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, lambda: len(another_way) > 1)
    path = directory(tmp_path).rates
    values = json.loads(path.read_text())
    values["host"]["hostname"] = "elsewhere"
    path.write_text(json.dumps(values))
    another_way.clear()
    run(tmp_path)
    assert another_way == []
    assert "another host" in caplog.text
    assert json.loads(path.read_text()) == values


@pytest.mark.parametrize("what", ["rates", "turn_seconds", "all of them"])
def test_damaged_rates_are_named(what: str, tmp_path: Path, another_way: list[MachineRates]) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, lambda: len(another_way) > 1)
    path = directory(tmp_path).rates
    values = json.loads(path.read_text())
    if what == "all of them":
        values["rates"] = "none"
    else:
        del (values if what == "rates" else values["rates"])[what]
    path.write_text(json.dumps(values))
    with pytest.raises(DamagedRunError, match=r"rates\.json"):
        run(tmp_path)


def test_attention_counts_where_single_tokens_are_decoded() -> None:
    base = PassRow(
        pass_index=0, phase="decode", num_sequences=1, real_tokens=1, padded_tokens=1, prompt_tokens=0,
        issued_tokens=1, useful_tokens=1, seconds=2.0, load_seconds=3.0, compute_seconds=4.0,
        attention_seconds=5.0, copy_seconds=6.0, predicted_load_seconds=1.0,
    )  # fmt: skip
    measured, predicted = worked([base, replace(base, phase="prefill")])
    assert measured == {
        Resource.disk: 6.0, Resource.link_in: 12.0, Resource.link_out: 12.0, Resource.compute: 8.0, Resource.cpu: 5.0,
    }  # fmt: skip
    assert predicted == dict.fromkeys(Resource, 0.0) | {Resource.disk: 2.0}


def tokens_of_fixed(root: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> dict[str, list[int]]:
    if monkeypatch is not None:
        monkeypatch.undo()
    run(root, kind=PolicyKind.fixed)
    return tokens(root, PolicyKind.fixed)
