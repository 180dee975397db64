"""Experts that stay in memory: which ones, how many bytes that saves, and that nothing else changes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.waiting import simulate_bytes, skew_routers
from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import Admission, DType, ExpertPaging, MachineConfig, Order, PolicyKind, Tier
from runtime.engine import experts
from runtime.engine.records import PassRecord, Phase
from runtime.errors import Interrupted
from runtime.model.loading import LoadedModel
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.experts import ExpertPages, Routing, expected_hits
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import RunPlan, plan_run
from runtime.plan.search.candidate import Problem, tune_chunks
from runtime.plan.shape.extents import slot_layout
from runtime.planning.planner import Planner
from runtime.sequences.sequence import Request
from runtime.stream.experts import COUNTED_PASSES, MAX_COUNTED_PASSES, ExpertStream
from runtime.units import GIB, MIB
from tests.generations import read_generations
from tests.runtime.expert_support import DEVICE, load, placement_of
from tests.runtime.test_expert_stream import RecordingReader
from tests.support import made_once, synthesize
from tests.toy import sizes_of, toy_mixture

NUM_EXPERTS, PER_TOKEN, SKEW = 256, 8, 0.1
WARM_PASSES = 2 * COUNTED_PASSES  # kept experts are counted, chosen, and read
KEPT = 64  # of the 512 of both layers


@pytest.fixture(scope="module")
def models(shared_home: Path) -> Path:
    """`even` and `skewed`: layers of 100 MB, of which a pass of 16 rows hits 40 % and, with visits that fall about as
    1 / rank, 25 %."""

    def make(home: Path) -> None:
        sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3}
        routers = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": PER_TOKEN, "n_group": 1}
        synthesize("glm-4-moe", home / "even", **sizes, **routers)
        skew_routers(home / "even", home / "skewed", SKEW)

    return made_once(shared_home / "kept experts", make)


def config_for(directory: Path, num_rows: int, **offload: object) -> RuntimeConfig:
    """Drawn tokens: greedy ones may repeat, and visits with them."""
    return RuntimeConfig(
        model=ModelConfig(name="test", path=str(directory), dtype=DType.float32),
        offload=OffloadConfig(
            **{"tier": Tier.nvme, "expert_paging": ExpertPaging.hit, "resident_layers": 0, **offload}  # pyright: ignore[reportArgumentType]
        ),
        policy=PolicyConfig(kind=PolicyKind.fixed, num_micro_batches=1, micro_batch_size=num_rows, draft_tokens=0),
        sampling=SamplingConfig(max_new_tokens=WARM_PASSES + 16, ignore_eos=True, temperature=1.0, seed=3),
        machine=MachineConfig(num_threads=1),
    )


def prompts_for(num_rows: int) -> list[list[int]]:
    return [[(7 * i + j * j * (i + 3)) % 600 + 5 for j in range(6)] for i in range(num_rows)]


def generated(
    config: RuntimeConfig, num_rows: int
) -> tuple[dict[int, tuple[int, ...]], list[PassRecord], RunPlan, float]:
    """Tokens, decode passes, the plan, and the bytes of a pass as simulated when the kept experts are chosen."""
    runtime = Runtime(config)
    requests = [r for i, p in enumerate(prompts_for(num_rows)) if isinstance(r := runtime.request(str(i), p), Request)]
    records, routings = list[PassRecord](), list[Routing | None]()

    def on_pass(record: PassRecord) -> None:
        if record.phase is not Phase.prefill:
            records.append(record)
            routings.append(session.routing)

    with runtime.open_with_backoff(requests) as (plan, session):
        tokens = {i: completion.token_ids for i, completion in session.generate(requests, on_pass)}
        simulated = simulate_bytes(runtime, plan, requests, routings[COUNTED_PASSES - 1])
        runtime.require_within_budget(plan)
    return tokens, records, plan, simulated


def steady_bytes(records: Sequence[PassRecord]) -> float:
    return float(np.mean([record.times.bytes_read_disk for record in records[WARM_PASSES:]]))


@pytest.mark.parametrize("num_rows", [16, 64])
def test_with_skewed_routers_passes_read_fewer_bytes_as_the_simulator_predicts(
    num_rows: int, models: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="runtime.stream.experts")
    config = config_for(models / "skewed", num_rows)
    plain, plain_records, plain_plan, plain_simulated = generated(config, num_rows)
    kept = replace(config, offload=replace(config.offload, kept_experts=KEPT))
    run_group, sizes = experts.run_group, list[int]()

    def counted(module: Any, matrices: Any, *arguments: Any) -> dict[int, torch.Tensor]:
        sizes.append(len(matrices))
        return run_group(module, matrices, *arguments)

    monkeypatch.setattr(experts, "run_group", counted)
    tokens, records, plan, simulated = generated(kept, num_rows)
    assert tokens == plain
    assert len(sizes) > len(records), "kept experts of a layer are multiplied together"
    assert not plain_plan.placement.num_kept_experts
    assert plan.placement.num_kept_experts == KEPT
    share = KEPT / (2 * NUM_EXPERTS)
    assert steady_bytes(records) < (1 - 1.5 * share) * steady_bytes(plain_records), "not those that are hit most"
    assert steady_bytes(plain_records) == pytest.approx(plain_simulated, rel=0.1)
    assert steady_bytes(records) == pytest.approx(simulated, rel=0.1)
    assert all(record.times.experts_read < record.times.experts_hit for record in records[1:])
    assert [f"{KEPT} of {2 * NUM_EXPERTS} stay in memory" in text for text in caplog.messages] == [True]


@pytest.mark.dealt
@pytest.mark.parametrize(
    ("admission", "order", "settings"),
    [
        (Admission.wave, Order.module_batched, {"num_micro_batches": 2}),
        (Admission.continuous, Order.zigzag, {"num_micro_batches": 2}),
        (Admission.wave, Order.zigzag, {"draft_tokens": 2}),
    ],
)
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_tokens_are_those_without_kept_experts(
    temperature: float | None, admission: Admission, order: Order, settings: dict[str, int], models: Path
) -> None:
    """In blocks of 4 of 6 rows, with two mirrors."""
    config = config_for(models / "skewed", 4)
    policy = replace(config.policy, micro_batch_size=2, num_micro_batches=2, admission=admission, schedule=order)
    config = replace(
        config,
        policy=replace(policy, **settings),  # pyright: ignore[reportArgumentType]
        sampling=replace(config.sampling, temperature=temperature),
        model=replace(config.model, mirrors=(str(models / "skewed"),)),
    )
    plain, plain_records, _, _ = generated(config, 6)
    tokens, records, _, _ = generated(replace(config, offload=replace(config.offload, kept_experts=KEPT)), 6)
    assert tokens == plain
    read, plain_read = (sum(r.times.experts_read for r in each) for each in (records, plain_records))
    assert read < 0.7 * plain_read


def test_experts_fill_what_whole_layers_leave_of_the_budget(models: Path) -> None:
    num_rows = 4
    config = config_for(models / "even", num_rows, kept_experts=0)
    plain, _, plan, _ = generated(config, num_rows)
    budget = plan.placement.ledgers[0].total_bytes + 50 * MIB
    offload = replace(config.offload, kept_experts=None, resident_layers=None, host_memory_gib=budget / GIB)
    tokens, records, plan, _ = generated(replace(config, offload=offload), num_rows)
    (ledger,) = plan.placement.ledgers
    entries = {entry.name: entry.num_bytes for entry in ledger.entries}
    size = plan.placement.num_kept_experts and entries["kept experts"] // plan.placement.num_kept_experts
    assert 100 < plan.placement.num_kept_experts < 2 * NUM_EXPERTS
    assert 0 <= ledger.left_bytes < size
    assert tokens == plain
    assert sum(r.times.experts_read for r in records) < 0.8 * sum(r.times.experts_hit for r in records)


@pytest.fixture(scope="module")
def loaded(many_experts: Callable[[str], Path]) -> LoadedModel:
    return load(many_experts("qwen3-next"))


@pytest.fixture
def reader() -> Iterator[RecordingReader]:
    with RecordingReader() as reader:
        yield reader


def open_stream(loaded: LoadedModel, reader: RecordingReader, num_kept: int) -> ExpertStream:
    placement = replace(placement_of(loaded, ExpertPaging.hit), num_kept_experts=num_kept)
    return ExpertStream(loaded.shape, placement, DEVICE, reader, paging=ExpertPaging.hit)


def run_pass(stream: ExpertStream, hit: Sequence[int], block: int = 0) -> list[int]:
    """A decode pass in which both stages hit the same experts. Returns the number that is read in each."""
    read = []
    for stage in (1, 2):
        assert [found.expert for found in stream.experts(stage, hit)] == list(hit)
        read.append(stream.take_counters().num_experts_read)
    stream.end_pass(block, 1, is_counted=True)
    return read


def test_kept_experts_have_the_files_bytes_and_are_read_once(loaded: LoadedModel, reader: RecordingReader) -> None:
    with open_stream(loaded, reader, num_kept=4) as stream:
        assert run_pass(stream, [3, 7, 9]) == [3, 3]
        assert run_pass(stream, [2, 3, 7, 9]) == [2, 2]  # the first two that were read in each stage
        for found in stream.experts(1, [3, 7, 9]):
            for piece in (piece for parameter in found.stage.parameters for piece in parameter.slices):
                begin = found.stage_bytes.tensor_offsets[piece.name]
                placed = found.stage_bytes.buffer[begin : begin + piece.num_bytes].numpy().tobytes()
                assert placed == Path(piece.file).read_bytes()[piece.offset : piece.offset + piece.num_bytes]


def test_experts_that_are_hit_most_take_the_place_of_others(loaded: LoadedModel, reader: RecordingReader) -> None:
    with open_stream(loaded, reader, num_kept=4) as stream:
        for number in range(COUNTED_PASSES):
            run_pass(stream, [*range(10 * number, 10 * number + 6), 200, 300])
        assert run_pass(stream, [100, 200, 300]) == [3, 3], "chosen, but not read since"
        assert run_pass(stream, [101, 200, 300]) == [1, 1]
        for number in range(COUNTED_PASSES):  # another block, with other rows
            run_pass(stream, [*range(10 * number, 10 * number + 6), 400, 401], block=1)
        run_pass(stream, [400, 401], block=1)
        assert run_pass(stream, [50, 400, 401], block=1) == [1, 1]


def test_even_hits_change_nothing_and_old_counts_fade(loaded: LoadedModel, reader: RecordingReader) -> None:
    generator = np.random.default_rng(0)
    with open_stream(loaded, reader, num_kept=8) as stream:
        for _ in range(COUNTED_PASSES):
            run_pass(stream, sorted(generator.choice(512, 40, replace=False).tolist()))
        assert run_pass(stream, list(range(512))) == [512 - 4, 512 - 4], "the first four of each stage stay"
        assert MAX_COUNTED_PASSES > COUNTED_PASSES


def test_what_chance_gives_an_even_router_promises_nothing() -> None:
    generator, runs = np.random.default_rng(1), 8
    even = generator.binomial(runs, 0.4, NUM_EXPERTS)
    skewed = generator.binomial(runs, np.minimum(1, 12 / np.arange(1, NUM_EXPERTS + 1)))

    def routing(hits: Sequence[int]) -> Routing:
        found = Routing.from_counts(hits, [runs] * NUM_EXPERTS, 16)
        assert found is not None
        return found

    a_fifth = routing(even.tolist())
    assert a_fifth.hit_share(16) == pytest.approx(even.mean() / runs, rel=0.05)
    assert a_fifth.hit_share(16, 0.2) > 0.9 * 0.8 * a_fifth.hit_share(16), "chance promises nothing"
    assert routing(skewed.tolist()).hit_share(16, 0.2) < 0.5 * routing(skewed.tolist()).hit_share(16)
    assert a_fifth.hit_share(1) < a_fifth.hit_share(16) < a_fifth.hit_share(64) < 1
    assert Routing.from_counts([0, 1], [0, 1], 16) is None, "a stage that has not run"


RATES = MachineRates(
    disk_bytes_per_second=1e8,
    link_in_bytes_per_second=1e12,
    link_out_bytes_per_second=1e12,
    memory_bytes_per_second=1e11,
    attention_bytes_per_second=1e11,
    cpu_attention_bytes_per_second=1e11,
    prefill_attention_flops_per_second=1e13,
    gemm_flops_per_second={1: 1e13},
)


def problem_of(kept_experts: int | None, hit_rates: Sequence[float] | None) -> Problem:
    """64 experts in each of 8 layers, of which a pass of 4 rows hits 2 per row."""
    shape = toy_mixture(num_experts=64)
    policy = PolicyConfig(kind=PolicyKind.fixed, num_micro_batches=1, micro_batch_size=4)
    offload = OffloadConfig(tier=Tier.nvme, kept_experts=kept_experts)
    routing = None if hit_rates is None else Routing(num_tokens=4.0, hit_rates=tuple(hit_rates) * 8)
    return Problem(
        shape=shape,
        config=RuntimeConfig(offload=offload, policy=policy),
        budgets=Budgets(host_bytes=110 * MIB),
        sizes=sizes_of([10] * 8, 40),
        rates=RATES,
        routing=routing,
    )


EVEN = [float(expected_hits(64, 2, 4)) / 64] * 64
SKEWED = [1.0] * 6 + [0.02] * 58


@pytest.mark.parametrize(("hit_rates", "keeps_experts"), [(None, False), (EVEN, False), (SKEWED, True)])
def test_the_simulator_decides_between_whole_layers_and_experts(
    hit_rates: Sequence[float] | None, keeps_experts: bool
) -> None:
    problem = problem_of(None, hit_rates)
    run = problem.place_blocks(problem.blocks(4, 1), 64)
    placement, layers = run.placement, {stage.index for stage in problem.shape.layers}
    assert placement.fits
    assert (placement.paged == layers) == keeps_experts
    whole_problem = problem_of(0, hit_rates)
    whole = whole_problem.place_blocks(whole_problem.blocks(4, 1), 64)
    assert whole.placement.resident & layers
    prediction, whole_prediction = problem.predict(run), whole_problem.predict(whole)
    assert prediction is not None
    assert whole_prediction is not None
    assert prediction.seconds <= whole_prediction.seconds
    if keeps_experts:
        assert prediction.decode.seconds < 0.7 * whole_prediction.decode.seconds


@pytest.mark.parametrize(("hit_rates", "keeps_experts"), [(EVEN, False), (SKEWED, True)])
def test_what_the_first_block_counts_may_change_what_memory_keeps(
    hit_rates: Sequence[float], keeps_experts: bool
) -> None:
    problem = problem_of(None, hit_rates)
    plan = plan_run(problem.shape, problem.config, problem.budgets, problem.sizes, rates=RATES)
    model = type("Model", (), {"shape": problem.shape})()
    planner = Planner(
        model=model,  # pyright: ignore[reportArgumentType] - only its shape is used
        config=problem.config,
        device=DEVICE,
        open_reader=lambda: pytest.fail("nothing is read"),
    )
    revised = planner.revise(plan, problem.sizes, RATES, problem.routing)
    assert (revised.placement.paged != plan.placement.paged) == keeps_experts
    assert revised.placement.routing is problem.routing
    assert (revised.blocks, revised.policy) == (plan.blocks, plan.policy)


@pytest.mark.parametrize(
    ("offload", "num_kept"),
    [
        (OffloadConfig(tier=Tier.nvme, resident_layers=0), 0),  # weights have what they are given
        (OffloadConfig(tier=Tier.nvme, resident_layers=0, kept_experts=5), 5),
        (OffloadConfig(tier=Tier.nvme, resident_layers=0, kept_experts=10_000), 8 * 64),
        (OffloadConfig(tier=Tier.nvme, kept_experts=0), 0),
        (OffloadConfig(tier=Tier.nvme, expert_paging=ExpertPaging.all, kept_experts=5, resident_layers=0), 0),
        (OffloadConfig(tier=Tier.none, kept_experts=5), 0),
    ],
)
def test_settings_say_how_many_experts_stay(offload: OffloadConfig, num_kept: int) -> None:
    problem = problem_of(None, None)
    budgets = Budgets(host_bytes=GIB)
    plan = plan_run(problem.shape, replace(problem.config, offload=offload), budgets, problem.sizes, rates=RATES)
    assert plan.placement.num_kept_experts == num_kept
    pages = ExpertPages.from_shape(problem.shape, plan.placement.paged).pages
    size = max((slot_layout(page).num_bytes for page in pages), default=0)
    counted = sum(entry.num_bytes for entry in plan.placement.ledgers[0].entries if entry.name == "kept experts")
    assert counted == num_kept * size


def test_a_run_that_is_stopped_goes_on_with_the_same_tokens(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In blocks of 2 of 4 rows. What was counted is lost with the process, and counted again."""
    num_polls = 0

    def run(name: str, kept_experts: int, stop_after: int | None = None) -> dict[str, list[int]]:
        def should_stop() -> bool:
            nonlocal num_polls
            num_polls += 1
            return stop_after is not None and num_polls > stop_after

        base = config_for(models / "skewed", 2, kept_experts=kept_experts)
        config = GenerateConfig(
            run=name,
            output_root=str(tmp_path),
            dataset=DatasetConfig(limit=4),
            **{group: getattr(base, group) for group in ("model", "offload", "policy", "machine")},
            sampling=SamplingConfig(max_new_tokens=COUNTED_PASSES + 4, ignore_eos=True),
        )
        generate(config, should_stop)
        table = read_generations(RunDirectory(path=tmp_path / "generate" / name))
        return dict(zip(table["id"].to_pylist(), table["token_ids"].to_pylist(), strict=True))

    plain = run("plain", 0)
    num_polls, most = 0, num_polls
    with pytest.raises(Interrupted):
        run("kept", KEPT, stop_after=most // 2)
    num_polls = 0
    caplog.set_level("INFO", logger="runtime.stream.experts")
    caplog.clear()
    assert run("kept", KEPT) == plain
    assert any(f"{KEPT} of {2 * NUM_EXPERTS} stay in memory" in text for text in caplog.messages)


def test_a_larger_chunk_does_not_trade_layers_for_single_experts_that_save_no_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = problem_of(None, None)
    policy = replace(problem.config.policy, micro_batch_size=8)
    problem = replace(
        problem,
        config=replace(problem.config, policy=policy),
        sizes=sizes_of([600] * 8, 40),
        budgets=Budgets(host_bytes=140 * MIB),
    )
    first = problem.place_blocks(problem.blocks(8, 1), 512)
    tuned = tune_chunks(problem, first)
    assert (tuned.chunk_tokens, tuned.placement.resident) == (512, first.placement.resident)
    monkeypatch.setattr(Problem, "favors_single", lambda *_: True)
    others = problem.place_blocks(first.blocks, 1024).placement
    assert others.num_kept_experts > first.placement.num_kept_experts
    assert len(others.resident) < len(first.placement.resident)
