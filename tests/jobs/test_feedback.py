"""What policy=hrm learns from a run's first block is recorded, and the run that goes on comes to the same."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig
from jobs.files.publishing import write_json
from jobs.record.passes import PassRow
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run.feedback import Feedback, busy_seconds
from jobs.run.tasks.generate import generate
from runtime.config.settings import (
    KVConfig,
    KVTier,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    PrefetchConfig,
    SamplingConfig,
    Tier,
)
from runtime.engine.session import Session
from runtime.errors import DamagedRunError, Interrupted
from runtime.library.api import Runtime
from runtime.plan import planner
from runtime.plan.cost.rates import MachineRates
from runtime.plan.planner import RunPlan, plan_run
from runtime.plan.search import grid as policy_grid
from runtime.planning import planner as planning
from runtime.resources import Resource
from runtime.sequences.sequence import Request
from tests.generations import read_generations

NUM_ROWS = 12


def config(root: Path, *, kind: PolicyKind = PolicyKind.hrm) -> GenerateConfig:
    return GenerateConfig(
        run=kind.value,
        output_root=str(root),
        dataset=DatasetConfig(limit=NUM_ROWS),
        offload=OffloadConfig(cache_dir=str(root / "cache"), host_memory_gib=2.0),  # what is free changes meanwhile
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
    """The rates by which a plan was revised: to go turn by turn."""
    by: list[MachineRates] = []

    def revised(
        self: Runtime, plan: RunPlan, requests: list[Request], rates: MachineRates, routing: object = None
    ) -> RunPlan:
        by.append(rates)
        assert plan.searched_policy is not None
        policy = replace(plan.searched_policy, schedule=Order.flexgen)
        way, sizes = policy.apply(self.config, has_device=False), [request.size for request in requests]
        found = plan_run(self.model.shape, way, self.budgets(), sizes, rates=rates, blocks=plan.blocks)
        return replace(found, searched_policy=policy)

    monkeypatch.setattr(Runtime, "revised", revised)
    return by


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """Those that sessions were opened with."""
    opened: list[RunPlan] = []
    session = Runtime.session
    monkeypatch.setattr(Runtime, "session", lambda self, plan: opened.append(plan) or session(self, plan))
    return opened


def recorded(root: Path) -> dict[str, Any]:
    return json.loads(directory(root).rates.read_text())


def has_learned(root: Path) -> bool:
    return directory(root).rates.exists() and recorded(root)["corrected"] is not None


def refuse_to_measure_and_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure_rates", lambda *_: pytest.fail("rates are known"))
    monkeypatch.setattr(planner, "search", lambda *_, **__: pytest.fail("the policy is known"))


def test_the_blocks_that_are_left_go_the_better_way(tmp_path: Path, another_way: list[MachineRates]) -> None:
    outcome = run(tmp_path)
    assert outcome.summary.rows["ok"] == NUM_ROWS
    assert "sync" in directory(tmp_path).schedule.read_text()
    assert tokens(tmp_path) == tokens_of_fixed(tmp_path)
    values = recorded(tmp_path)
    assert another_way == [MachineRates.from_plain(values["corrected"])]
    assert MachineRates.from_plain(values["rates"]) != another_way[0]
    assert values["policy"]["schedule"] == "flexgen"


@pytest.mark.slow("jobs/test_feedback.py::test_the_blocks_that_are_left_go_the_better_way")
def test_a_run_that_goes_on_goes_the_way_that_it_has_learned(
    tmp_path: Path, another_way: list[MachineRates], plans: list[RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, lambda: len(plans) > 1)
    refuse_to_measure_and_search(monkeypatch)
    run(tmp_path)
    assert [plan.policy.schedule for plan in plans[1:]] == [Order.flexgen] * 2
    assert replace(plans[2], placement=plans[1].placement) == plans[1]  # but for the memory that is free
    assert len(another_way) == 1
    assert tokens(tmp_path) == tokens_of_fixed(tmp_path, monkeypatch)


def kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that no search would come to: in turns, as another run is taken to have found."""
    with pytest.raises(Interrupted):
        run(root, lambda: directory(root).rates.exists())
    (path,) = (root / "cache" / "policies").iterdir()
    values = json.loads(path.read_text())
    values["policy"]["schedule"] = Order.flexgen.value
    path.write_text(json.dumps(values))
    shutil.rmtree(directory(root).path)


def halved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out once, at the start."""
    tries: list[int] = []

    def probe(self: Session, requests: Sequence[Request]) -> None:
        tries.append(len(requests))
        if len(tries) == 1:
            raise MemoryError("none left")

    monkeypatch.setattr(Session, "probe", probe)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("start", [kept, halved])
@pytest.mark.parametrize("has_learned_first", [True, False])
def test_however_it_came_to_its_policy_a_run_that_goes_on_keeps_it(
    start: Callable[[Path, pytest.MonkeyPatch], None],
    has_learned_first: bool,
    tmp_path: Path,
    plans: list[RunPlan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "WORTHWHILE", 1.0)  # the same way, by what is learned
    start(tmp_path, monkeypatch)
    plans.clear()
    with pytest.raises(Interrupted):
        run(tmp_path, (lambda: has_learned(tmp_path)) if has_learned_first else directory(tmp_path).rates.exists)
    first = plans[-1]
    assert recorded(tmp_path)["policy"] == (first.searched_policy and first.searched_policy.to_plain())
    shutil.rmtree(tmp_path / "cache" / "policies")
    monkeypatch.setattr(planning, "measure_rates", lambda *_: pytest.fail("rates are known"))
    run(tmp_path)
    last = plans[-1]
    assert (last.searched_policy, last.policy, last.kv, last.blocks) == (
        first.searched_policy,
        first.policy,
        first.kv,
        first.blocks,
    )
    if start is kept:
        assert last.policy.schedule is Order.flexgen
    assert tokens(tmp_path) == tokens_of_fixed(tmp_path, monkeypatch)


def test_a_way_that_promises_too_little_is_not_taken(
    tmp_path: Path, plans: list[RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "WORTHWHILE", 1.0)
    run(tmp_path)
    assert len(plans) == 1
    assert has_learned(tmp_path)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("key", ["host", "settings"])
def test_rates_from_elsewhere_are_no_use(
    key: str, tmp_path: Path, another_way: list[MachineRates], plans: list[RunPlan], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, lambda: len(plans) > 1)
    values = recorded(tmp_path) | {key: "another"}
    directory(tmp_path).rates.write_text(json.dumps(values))
    run(tmp_path)
    assert len(another_way) == 1
    assert "another host" in caplog.text
    assert recorded(tmp_path) == values


@pytest.mark.parametrize(
    "changed",
    [
        {"offload": OffloadConfig(tier=Tier.nvme)},
        {"kv": KVConfig(tier=KVTier.nvme)},
        {"prefetch": PrefetchConfig(depth=3)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_rates_hold_for_the_roads_that_they_were_learned_on(
    changed: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As written by a run whose config differs in one group: what is on disk is not touched."""
    rates = MachineRates(disk_bytes_per_second=1e9, gemm_flops_per_second={1: 1e9})
    first = Runtime(config(tmp_path).runtime)
    path = tmp_path / "rates.json"
    made = Feedback(path=path, runtime=first, requests=[])
    write_json(
        path, {**made._validity_key(), "rates": rates.to_plain(), "corrected": None, "policy": None}, exclusive=False
    )
    first.config = replace(first.config, **changed)
    feedback = Feedback(path=path, runtime=first, requests=[])
    feedback.restore()
    assert feedback.rates is None, "they hold for others"
    assert "another host" in caplog.text


@pytest.mark.slow("jobs/test_feedback.py::test_rates_from_elsewhere_are_no_use")
def test_rates_from_elsewhere_give_way_to_those_of_the_first_block(tmp_path: Path, plans: list[RunPlan]) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, lambda: directory(tmp_path).rates.exists())
    values = recorded(tmp_path) | {"host": "another"}
    directory(tmp_path).rates.write_text(json.dumps(values))
    run(tmp_path)
    assert recorded(tmp_path)["host"] != "another"
    assert has_learned(tmp_path)


@pytest.mark.slow("jobs/test_feedback.py::test_rates_from_elsewhere_are_no_use")
def test_nothing_is_learned_from_a_first_block_whose_rates_are_gone(
    tmp_path: Path, another_way: list[MachineRates], plans: list[RunPlan]
) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, lambda: len(plans) > 1)
    directory(tmp_path).rates.unlink()
    run(tmp_path)
    assert len(another_way) == 1
    assert not directory(tmp_path).rates.exists()


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("what", ["rates", "turn_seconds", "all of them", "policy"])
def test_damaged_rates_are_named(what: str, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, directory(tmp_path).rates.exists)
    path = directory(tmp_path).rates
    values = json.loads(path.read_text())
    if what == "all of them":
        values["rates"] = "none"
    else:
        del (values["rates"] if what == "turn_seconds" else values)[what]
    path.write_text(json.dumps(values))
    with pytest.raises(DamagedRunError, match=r"rates\.json"):
        run(tmp_path)


def test_attention_counts_where_single_tokens_are_decoded() -> None:
    base = PassRow(
        pass_index=0, phase="decode", num_sequences=1, real_tokens=1, padded_tokens=1, prompt_tokens=0,
        issued_tokens=1, useful_tokens=1, seconds=2.0, load_seconds=3.0, compute_seconds=4.0,
        attention_seconds=5.0, copy_seconds=6.0, predicted_load_seconds=1.0,
    )  # fmt: skip
    measured, predicted = busy_seconds([base, replace(base, phase="prefill")])
    assert measured == {
        Resource.disk: 6.0,
        Resource.host_to_device: 12.0,
        Resource.device_to_host: 12.0,
        Resource.compute: 8.0,
        Resource.cpu_attention: 5.0,
    }
    assert predicted == dict.fromkeys(measured, 0.0) | {Resource.disk: 2.0}


def tokens_of_fixed(root: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> dict[str, list[int]]:
    if monkeypatch is not None:
        monkeypatch.undo()
    run(root, kind=PolicyKind.fixed)
    return tokens(root, PolicyKind.fixed)
