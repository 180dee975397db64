"""Trials: which policies are worth a plan, found with fewer plans than a search that makes all of them."""

from collections import Counter

import pytest

from runtime.batching.balance import Block
from runtime.batching.prefixes import SharedPrefix
from runtime.config.settings import PolicyConfig, PolicyKind, RuntimeConfig, Tier
from runtime.plan.cost.machine import Machine
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.planner import plan_policy
from runtime.plan.search import trials
from runtime.plan.search.candidate import PlacedRun, Problem
from runtime.plan.search.grid import GridAxes
from runtime.plan.search.hrm import make_roofline, search, select_fitting
from runtime.plan.search.trials import Trial, Trials
from runtime.plan.search.workload import Workload
from runtime.plan.shape.model import ModelShape
from tests.default_table import SLOW as SLOW_RATIO
from tests.default_table import Case, wider
from tests.runtime.test_hrm import SHAPES, SLOW, WITH_DEVICE, WITHOUT, config, problem
from tests.toy import toy_shape

WORKLOAD = Workload.from_mean(48, mean=40, longest=120, max_new_tokens=24)
NAMES = [*SHAPES, "encoder"]


def shape_of(name: str) -> ModelShape:
    return toy_shape(is_packed=False, num_encoder_layers=3) if name == "encoder" else SHAPES[name]


def tried(name: str, machine: Machine, asked: RuntimeConfig | None = None) -> Trials:
    shape, asked = shape_of(name), asked or config()
    case = problem(shape, machine, asked, WORKLOAD)
    grid = GridAxes.from_config(shape, asked, 48, has_device=machine.device_bytes is not None).grid(48)
    within = select_fitting(shape, machine, WORKLOAD, asked, grid)
    bounds = make_roofline(shape, machine, WORKLOAD, asked).seconds(within)
    return Trials(problem=case, grid=within, bounds=bounds)


@pytest.fixture(params=NAMES)
def found(request: pytest.FixtureRequest) -> tuple[Trials, list[Trial]]:
    every = tried(str(request.param), WITH_DEVICE)
    return every, every.best()


@pytest.mark.dealt(most=2)
def test_trials_are_of_different_policies_the_fastest_first(found: tuple[Trials, list[Trial]]) -> None:
    _, best = found
    assert len({trial.index for trial in best}) == len(best) > 1
    assert [trial.seconds for trial in best] == sorted(trial.seconds for trial in best)


@pytest.mark.dealt(most=2)
def test_a_trial_is_within_a_third_of_what_the_plan_takes(found: tuple[Trials, list[Trial]]) -> None:
    every, best = found
    for trial in best[:3]:
        plan = plan_policy(every.problem.with_policy(trial.policy))
        assert plan.prediction is not None
        assert trial.seconds == pytest.approx(plan.prediction.seconds, rel=1 / 3)


def test_what_the_roofline_holds_to_be_hopeless_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for_all, best = tried("moe", WITHOUT), dict[float, list[Trial]]()
    for slack in (1.0, 100.0):
        monkeypatch.setattr(trials, "MAX_BOUND_RATIO", slack)
        best[slack] = for_all.best()
    assert len(best[1.0]) < len(best[100.0])
    assert best[1.0][0].seconds <= 1.01 * best[100.0][0].seconds


def test_where_prompts_wait_for_weights_larger_chunks_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = list[int]()
    placed = Problem.place_blocks

    def noted(self: Problem, blocks: tuple[object, ...], num_tokens: int) -> PlacedRun:
        chunks.append(num_tokens)
        return placed(self, blocks, num_tokens)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Problem, "place_blocks", noted)
    for share, are_tried in ((0.0, True), (2.0, False)):
        monkeypatch.setattr(trials, "STALL_SHARE", share)
        chunks.clear()
        tried("dense", WITH_DEVICE).best()
        assert (max(chunks) > trials.SWEEP_TOKENS) is are_tried


def test_chunks_that_are_set_are_those_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = RuntimeConfig(offload=config().offload, policy=PolicyConfig(kind=PolicyKind.hrm, prefill_chunk_tokens=96))
    chunks = set[int]()
    placed = Problem.place_blocks

    def noted(self: Problem, blocks: tuple[object, ...], num_tokens: int) -> PlacedRun:
        chunks.add(num_tokens)
        return placed(self, blocks, num_tokens)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Problem, "place_blocks", noted)
    tried("moe", WITH_DEVICE, asked).best()
    assert chunks == {96}


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("machine", [WITH_DEVICE, WITHOUT], ids=lambda machine: machine.name)
def test_a_search_is_as_good_as_one_of_several_times_as_many_candidates(name: str, machine: Machine) -> None:
    machine = Machine(**{**vars(machine), "rates": SLOW})
    asked = problem(shape_of(name), machine, config(Tier.auto if machine.device_bytes else Tier.nvme), WORKLOAD)
    seconds = search(asked, workload=WORKLOAD)[0].best.seconds
    with wider():
        wide = search(asked, workload=WORKLOAD)[0]
    assert seconds < SLOW_RATIO * wide.best.seconds


def test_a_trial_of_many_requests_places_one_block_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to about the seconds that all blocks come to."""
    policy = PolicyConfig(kind=PolicyKind.hrm, micro_batch_size=4, num_micro_batches=4)
    asked, counts = RuntimeConfig(offload=config().offload, policy=policy), list[int]()
    placed = Problem.place_blocks

    def noted(self: Problem, blocks: tuple[Block, ...], num_tokens: int) -> PlacedRun:
        counts.append(sum(len(block.members) for block in blocks))
        return placed(self, blocks, num_tokens)

    whole = {trial.index: trial.seconds for trial in tried("dense", WITH_DEVICE, asked).best()}
    monkeypatch.setattr(trials, "MANY_REQUESTS", 10)
    monkeypatch.setattr(Problem, "place_blocks", noted)
    some = {trial.index: trial.seconds for trial in tried("dense", WITH_DEVICE, asked).best()}
    assert max(counts) == 4 * 4
    both = whole.keys() & some.keys()
    assert len(both) > 3
    assert all(some[place] == pytest.approx(whole[place], rel=0.1) for place in both)


def test_of_requests_that_begin_alike_some_are_neighbours() -> None:
    tasks = [SharedPrefix(num_tokens=40) for _ in range(10)]
    prompts = [(SharedPrefix(num_tokens=60, parent=task), turn) for turn in range(20) for task in tasks]
    sizes = [
        SequenceSize(num_prompt_tokens=90 + turn, max_new_tokens=4, prefix=prefix)
        for prefix, turn in prompts
        for _ in range(4)
    ]
    case = Problem(shape=SHAPES["dense"], config=config(), budgets=WITH_DEVICE.budgets, sizes=sizes, rates=None)
    some = case.sample(200).sizes
    assert len(some) == 200
    shared = Counter(size.prefix for size in some)
    assert sum(count == 4 for count in shared.values()) >= 48
    assert len({size.prefix.parent for size in some if size.prefix is not None}) <= 8
    assert case.sample(800) is case


@pytest.mark.slow("runtime/test_trials.py::test_a_search_is_as_good_as_one_of_several_times_as_many_candidates")
@pytest.mark.parametrize(
    ("case", "tier"),
    [
        pytest.param(
            Case(model="glm-4.7", machine="rtx3060", max_new_tokens=512),
            Tier.nvme,
            id="dense first layers",
        ),
        pytest.param(Case(model="opt-30b", machine="cpu", max_new_tokens=32), Tier.none, id="a short last chunk"),
    ],
)
def test_all_tiers_together_are_as_fast_as_one_by_itself(case: Case, tier: Tier) -> None:
    found, alone = case.planned(), case.planned(tier, PolicyKind.hrm)
    assert found is not None
    assert alone is not None
    assert found.prediction.seconds < SLOW_RATIO * alone.prediction.seconds


@pytest.mark.slow("runtime/test_trials.py::test_a_search_is_as_good_as_one_of_several_times_as_many_candidates")
def test_blocks_whose_padded_lanes_differ_are_tried_by_more_than_one_of_them() -> None:
    case = Case(model="flan-t5-xxl", machine="l4", max_new_tokens=32)
    found = case.planned()
    with wider():
        wide = case.planned(kind=PolicyKind.hrm)
    assert found is not None
    assert wide is not None
    assert found.prediction.seconds < SLOW_RATIO * wide.prediction.seconds
