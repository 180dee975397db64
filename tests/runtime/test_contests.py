"""A run of some length compares the linear backends of its main products where nobody has measured this machine: the
faster one is taken, other work on the machine decides nothing for good, and little time is spent. By a clock that
backends which compute nothing set forward."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
import torch

from runtime import Runtime
from runtime.config.profiles import DEFAULT_BACKENDS, BackendTable, LinearBackend
from runtime.config.settings import Tier
from runtime.linear.backends import BACKENDS
from runtime.measure import contests, linear
from runtime.measure.contests import MIN_ROUNDS, SECONDS, compare_backends, known_backends, main_products
from runtime.measure.machine_cache import (
    BackendComparison,
    current_host,
    find_comparisons,
    find_latest_rates,
    find_products,
    save_comparisons,
    save_rates,
)
from runtime.model.loading import LoadedModel
from runtime.plan.cost.calibration import TypicalLoad
from runtime.planning import planner as planning
from runtime.requests.prompts import Request
from tests.fake_device import FakeDevice
from tests.runtime.test_families import References, Runtimes, config_for, tokens
from tests.runtime.test_machine_cache import RATES
from tests.support import always

HOST = current_host("cpu", 2)
RULE, OTHER, SLOW = LinearBackend.vectors, LinearBackend.onednn, LinearBackend.weights_first
USUAL = TypicalLoad(chunk_tokens=64, num_rows=64, num_prompt_tokens=8, num_positions=12)
MOST_ACTS = 2 * 3  # of one comparison that cannot wait: two by each of three backends


@dataclass(kw_only=True)
class Machine:
    """`seconds` of an act by backend, or of its acts one after the other, the last for good; `running` threads."""

    seconds: dict[LinearBackend, float | list[float]]
    running: int = 1
    now: float = 0.0
    acts: list[LinearBackend] = field(default_factory=list)

    def multiply(self, way: LinearBackend) -> None:
        seconds, turn = self.seconds[way], self.acts.count(way)
        self.acts.append(way)
        self.now += seconds if isinstance(seconds, float) else seconds[min(turn, len(seconds) - 1)]

    def compare(self, model: LoadedModel, usual: TypicalLoad = USUAL) -> BackendTable:
        self.acts.clear()
        return compare_backends(model, HOST, usual, clock=lambda: self.now, num_running=lambda: self.running)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Three backends, of which the rule takes the first; no comparison is known."""
    found = Machine(seconds={RULE: 0.010, OTHER: 0.007, SLOW: 0.05})

    def by(way: LinearBackend) -> Callable[[torch.Tensor, object], torch.Tensor]:
        def multiplied(x: torch.Tensor, blocks: object) -> torch.Tensor:
            found.multiply(way)
            return x

        return multiplied

    for way in found.seconds:
        monkeypatch.setitem(cast("dict[LinearBackend, object]", BACKENDS), way, by(way))
    for module in (contests, linear):
        monkeypatch.setattr(module, "supported_backends", lambda x, blocks: [RULE, OTHER, SLOW])
    monkeypatch.setattr(contests.os, "cpu_count", lambda: 2)
    monkeypatch.setattr("runtime.measure.machine_cache.cache_root", lambda: tmp_path / "cache")
    return found


@pytest.fixture
def model(reference: References, opened: Runtimes) -> LoadedModel:
    return opened(config_for(reference("llama"), Tier.none)).model


def taken(table: BackendTable, num_rows: int = 64) -> LinearBackend:
    """For the products that the model has most of; without an entry by the rule."""
    return table.fastest("bfloat16", is_tall=False, num_rows=num_rows) or RULE


def doubts() -> list[str | None]:
    return [each.doubt for each in find_comparisons(HOST, contests._kernels_digest()).values()]


def test_the_faster_one_is_taken_and_known_to_later_runs(machine: Machine, model: LoadedModel) -> None:
    table = machine.compare(model)
    assert taken(table) is OTHER
    assert known_backends(HOST) == table
    assert doubts() == [None] * len(main_products(model.shape, model.compute_dtype, USUAL))
    assert machine.compare(model) == table
    assert not machine.acts, "what is settled is not compared again"


@pytest.mark.parametrize("other", [0.0097, 0.010, 0.012], ids=["under 5 %", "as fast", "slower"])
def test_without_a_clear_gain_it_stays_with_the_rule(other: float, machine: Machine, model: LoadedModel) -> None:
    machine.seconds[OTHER] = other
    assert machine.compare(model) == DEFAULT_BACKENDS
    assert doubts().count(None) == len(doubts())
    assert known_backends(HOST) is None


def test_a_clear_gap_ends_a_comparison_early_and_who_is_out_of_it_is_not_timed_again(
    machine: Machine, model: LoadedModel
) -> None:
    machine.compare(model)
    num_products = len(doubts())
    assert machine.acts.count(SLOW) == 2 * num_products
    assert machine.acts.count(OTHER) == (1 + MIN_ROUNDS) * num_products


@pytest.mark.parametrize("held_up", [RULE, OTHER])
def test_of_each_the_best_round_counts(held_up: LinearBackend, machine: Machine, model: LoadedModel) -> None:
    machine.seconds = {RULE: 0.010, OTHER: 0.010, SLOW: 0.05, held_up: [0.010, 0.0145, 0.014, 0.010]}
    assert machine.compare(model) == DEFAULT_BACKENDS


def test_rounds_that_differ_much_decide_only_when_a_second_run_agrees(machine: Machine, model: LoadedModel) -> None:
    machine.seconds = {RULE: [0.010, 0.010, 0.015] * 40, OTHER: [0.009, 0.009, 0.013] * 40, SLOW: 0.05}
    assert machine.compare(model) == DEFAULT_BACKENDS
    assert any(doubt is not None and "differed" in doubt for doubt in doubts())
    machine.seconds = {RULE: 0.010, OTHER: 0.009, SLOW: 0.05}
    assert taken(machine.compare(model)) is OTHER
    assert doubts().count(None) == len(doubts())


def test_a_machine_with_other_work_decides_nothing_for_good(machine: Machine, model: LoadedModel) -> None:
    machine.running, machine.seconds[RULE] = 4, 0.013
    assert machine.compare(model) == DEFAULT_BACKENDS
    assert doubts() == ["4 threads shared 2 processors"] * len(doubts())
    machine.compare(model)
    assert machine.acts, "it is compared again, however often"
    machine.running, machine.seconds = 1, {RULE: 0.007, OTHER: 0.0075, SLOW: 0.05}
    assert machine.compare(model) == DEFAULT_BACKENDS, "what was seen without other work counts"
    assert doubts() == [None] * len(doubts())


def test_a_rule_that_is_unlikely_wrong_is_given_up_once_two_runs_have_seen_it(
    machine: Machine, model: LoadedModel
) -> None:
    machine.seconds[RULE] = 0.03
    assert machine.compare(model) == DEFAULT_BACKENDS
    assert any(doubt is not None and "times as long as another" in doubt for doubt in doubts())
    assert taken(machine.compare(model)) is OTHER
    machine.compare(model)
    assert not machine.acts


def test_comparisons_keep_to_their_time_and_leave_the_rest_to_the_next_run(
    machine: Machine, model: LoadedModel
) -> None:
    usual = replace(USUAL, chunk_tokens=512, num_rows=4)
    wanted = [each.name for each in main_products(model.shape, model.compute_dtype, usual)]
    assert len(wanted) > 2
    machine.seconds = {RULE: 0.12, OTHER: 0.12, SLOW: 0.12}
    machine.compare(model, usual)
    assert machine.now < SECONDS + MOST_ACTS * 0.12
    known = find_comparisons(HOST, contests._kernels_digest())
    assert 0 < len(known) < len(wanted)
    assert wanted[0] in known, "what has the most FLOPs comes first"
    for _ in wanted:
        machine.compare(model, usual)
    assert set(find_comparisons(HOST, contests._kernels_digest())) == set(wanted)


def test_where_nothing_can_be_kept_the_run_still_takes_the_faster_one(
    machine: Machine, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("runtime.measure.machine_cache.cache_root", lambda: tmp_path / "file")
    assert taken(machine.compare(model)) is OTHER
    assert known_backends(HOST) is None


@pytest.mark.parametrize("damage", ["{", '{"contests": 3}', {"vectors": "fast"}, {"abacus": 1.0}, {"vectors": 0.0}])
def test_a_damaged_file_is_named_and_written_anew(
    damage: str | dict[str, object], machine: Machine, model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    table = machine.compare(model)
    if not isinstance(damage, str):
        values = json.loads(HOST.path.read_text())
        next(iter(values["contests"]["found"].values()))["gflops"] |= damage
        damage = json.dumps(values)
    HOST.path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert known_backends(HOST) is None
    assert str(HOST.path) in caplog.text
    assert machine.compare(model) == table
    assert known_backends(HOST) == table


def test_processes_that_keep_at_once_leave_a_whole_file(machine: Machine) -> None:
    def kept(number: int) -> set[str]:
        one = BackendComparison(gflops={"vectors": 1.0}, num_times=1, doubt=None, conditions={})
        save_comparisons(HOST, "", {f"{number} {turn}": one for turn in range(50)})
        return {name.split()[0] for name in find_comparisons(HOST, "")}

    with ThreadPoolExecutor(8) as pool:
        assert all(len(writers) == 1 for writers in pool.map(kept, range(40)))
    assert len(list(HOST.path.parent.iterdir())) == 1


def test_other_kernels_threads_and_instruction_sets_are_compared_anew(
    machine: Machine, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = machine.compare(model)
    assert known_backends(replace(HOST, num_threads=7)) is None
    monkeypatch.setenv("WEIGHTSTREAM_ISA", "another")
    assert known_backends(current_host("cpu", 2)) is None
    monkeypatch.undo()
    assert table != DEFAULT_BACKENDS
    monkeypatch.setattr(contests, "_kernels_digest", lambda: "another")
    assert known_backends(HOST) is None


def test_rates_stay_beside_what_runs_find_and_a_measurement_replaces_it(machine: Machine, model: LoadedModel) -> None:
    save_rates(HOST, RATES)
    machine.compare(model)
    assert find_latest_rates() == RATES
    assert find_products(HOST) is None
    save_rates(HOST, RATES, always(LinearBackend.inputs_first))
    assert known_backends(HOST) is None
    assert find_products(HOST) == always(LinearBackend.inputs_first)


def test_what_runs_found_holds_no_rates(machine: Machine, model: LoadedModel) -> None:
    machine.compare(model)
    assert find_latest_rates() is None


@pytest.mark.parametrize(("family", "num_rows", "rows"), [("llama", 70, [64]), ("mixtral", 16, [4, 16])])
def test_the_products_of_a_run_are_its_own(
    family: str, num_rows: int, rows: list[int], reference: References, opened: Runtimes
) -> None:
    """Those of experts have the rows of one of them."""
    model = opened(config_for(reference(family), Tier.none)).model
    usual = TypicalLoad(chunk_tokens=num_rows, num_rows=num_rows, num_prompt_tokens=8, num_positions=12)
    found = main_products(model.shape, model.compute_dtype, usual)
    assert sorted({each.num_rows for each in found}) == rows
    shapes = {tuple(parameter.shape[-2:]) for stage in model.shape.stages for parameter in stage.parameters}
    assert {(each.num_outputs, each.num_inputs) for each in found} <= shapes
    assert {str(each.kind) for each in found} == {"bfloat16, wide", "bfloat16, tall"}
    assert [each.flops for each in found] == sorted((each.flops for each in found), reverse=True)


Comparisons = list[BackendTable | None]
FOUND = always(LinearBackend.inputs_first)


@pytest.fixture
def comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparisons:
    """Each comparison that a runtime asks for, by the table that its model had; it finds `FOUND`."""
    comparisons: Comparisons = []

    def compare(model: LoadedModel, host: object, usual: object) -> BackendTable:
        comparisons.append(model.backends)
        return FOUND

    monkeypatch.setattr(planning, "compare_backends", compare)
    monkeypatch.setattr("runtime.measure.machine_cache.cache_root", lambda: tmp_path)
    return comparisons


def requests_of(runtime: Runtime, reference: References) -> list[Request]:
    made = [runtime.request(str(index), prompt) for index, prompt in enumerate(reference("llama").prompts)]
    return [request for request in made if isinstance(request, Request)]


def test_a_run_that_is_over_in_seconds_compares_nothing(reference: References, comparisons: Comparisons) -> None:
    runtime = Runtime(config_for(reference("llama")))
    assert runtime.plan(requests_of(runtime, reference)).backends == DEFAULT_BACKENDS
    assert not comparisons


@pytest.fixture
def long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "COMPARED_SECONDS", 0.0)


def test_a_run_of_some_length_goes_by_what_its_comparison_finds(
    reference: References, comparisons: Comparisons, long_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: Comparisons = []
    measure_rates = planning.measure_rates

    def noted(loaded: LoadedModel, *rest: object) -> object:
        measured.append(loaded.backends)
        return measure_rates(loaded, *rest)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(planning, "measure_rates", noted)
    ref = reference("llama")
    with Runtime(config_for(ref)) as runtime:
        requests = requests_of(runtime, reference)
        assert runtime.plan(requests).backends == FOUND
        assert runtime.model.backends == FOUND
        assert measured == [None, FOUND], "rates are those of the backends that the run takes"
        assert runtime.plan(requests).backends == FOUND
    assert comparisons == [None], "a runtime changes once"
    assert measured == [None, FOUND]


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_what_a_run_really_compares_leaves_its_tokens_as_they_are(
    family: str, reference: References, long_runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.measure.machine_cache.cache_root", lambda: tmp_path)
    ref = reference(family)
    runtime = Runtime(config_for(ref))
    assert tokens(runtime, ref.prompts) == ref.expected
    assert find_comparisons(runtime.host, contests._kernels_digest())


def test_where_a_machine_was_measured_no_run_compares(
    reference: References, comparisons: Comparisons, long_runs: None
) -> None:
    config = config_for(reference("llama"))
    save_rates(Runtime(config).host, RATES, always(LinearBackend.onednn))
    runtime = Runtime(config)
    assert runtime.plan(requests_of(runtime, reference)).backends == always(LinearBackend.onednn)
    assert not comparisons


def test_in_front_of_an_accelerator_no_run_compares(
    reference: References, comparisons: Comparisons, long_runs: None
) -> None:
    runtime = Runtime(config_for(reference("llama")), device=FakeDevice())
    assert runtime.plan(requests_of(runtime, reference)).backends is None
    assert not comparisons


@pytest.mark.parametrize("begun_with", [DEFAULT_BACKENDS, always(LinearBackend.onednn)], ids=["the rule", "a table"])
def test_a_run_that_goes_on_keeps_what_it_was_begun_with(
    begun_with: BackendTable, reference: References, comparisons: Comparisons, long_runs: None
) -> None:
    config = config_for(reference("llama"))
    save_rates(Runtime(config).host, RATES, always(LinearBackend.weights_first))
    runtime = Runtime(config)
    plan = runtime.plan(requests_of(runtime, reference), backends=begun_with)
    assert plan.backends == begun_with
    assert runtime.model.backends == begun_with
    assert not comparisons
