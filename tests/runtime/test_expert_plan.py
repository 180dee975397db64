"""Which experts can be read one by one, when that pays, and what it costs in memory."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from runtime.config.settings import (
    Admission,
    ExpertPaging,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    Tier,
)
from runtime.plan.placement.experts import (
    GROUPED_VISITS,
    ExpertPages,
    ExpertPhase,
    batch_entries,
    choose_paging,
    dense_shape,
    expected_hits,
    host_entries,
    multiplies_all_experts,
    pageable_stages,
    slot_entry,
    visit_entries,
)
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import plan_run
from runtime.plan.schedule.walk import Walk
from runtime.plan.shape.extents import slot_layout
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Companion, Parameter, Stage, StageKind, TensorSlice
from runtime.plan.shape.stage_sizes import ExpertSizes
from runtime.units import GIB, KIB
from tests.runtime.expert_support import unpageable_stacks
from tests.toy import LAYER_ROWS, sizes_of, toy_mixture, toy_shape

NUM_EXPERTS, ROWS, COLUMNS = 6, 128, 64
MATRIX_BYTES = ROWS * COLUMNS * 2


def matrix(name: str, offset: int, companion: Companion | None = None) -> TensorSlice:
    return TensorSlice(
        name=name,
        file="model",
        offset=offset,
        num_bytes=MATRIX_BYTES,
        dtype="BF16",
        shape=(ROWS, COLUMNS),
        companions=() if companion is None else (companion,),
    )


def factors(name: str, offset: int) -> Companion:
    tensor = TensorSlice(name=name, file="model", offset=offset, num_bytes=4, dtype="F32", shape=(1, 1))
    return Companion(role="scales", tensor=tensor, block_rows=ROWS, block_columns=COLUMNS)


def parameter(name: str, pieces: Sequence[TensorSlice], *, is_experts: bool = True) -> Parameter:
    return Parameter(
        name=name,
        shape=(len(pieces), ROWS, COLUMNS),
        pieces=tuple((piece,) for piece in pieces),
        is_stacked=True,
        is_experts=is_experts,
    )


def merged(name: str, begin: int) -> Parameter:
    """A tensor for each expert."""
    return parameter(name, [matrix(f"{name}.{e}", begin + e * MATRIX_BYTES) for e in range(NUM_EXPERTS)])


def fused(name: str, begin: int) -> Parameter:
    """One tensor of all experts."""
    shape = (NUM_EXPERTS, ROWS, COLUMNS)
    piece = replace(matrix(name, begin), num_bytes=NUM_EXPERTS * MATRIX_BYTES, shape=shape)
    return Parameter(name=name, shape=shape, pieces=((piece,),), is_experts=True)


def bias(name: str, offset: int) -> Parameter:
    piece = TensorSlice(
        name=name,
        file="model",
        offset=offset,
        num_bytes=NUM_EXPERTS * ROWS * 2,
        dtype="BF16",
        shape=(NUM_EXPERTS, ROWS),
    )
    return Parameter(name=name, shape=piece.shape, pieces=((piece,),))


def stage_of(*parameters: Parameter) -> Stage:
    return Stage(
        index=1, name="layer 0", kind=StageKind.layer, parameters=parameters, num_experts=NUM_EXPERTS,
        num_experts_per_token=2,
    )  # fmt: skip


def shape_with(stage: Stage) -> ModelShape:
    toy = toy_shape(2)
    return replace(toy, stages=(toy.stages[0], stage, *toy.stages[2:]))


MIB_APART = 1024 * KIB
GATE, DOWN, BIAS = merged("gate", 4096), fused("down", 4096 + MIB_APART), bias("bias", 4096 + 2 * MIB_APART)
STAGE = stage_of(GATE, DOWN, BIAS)


def test_experts_and_the_dense_part_are_all_bytes_of_the_stage_once() -> None:
    parts = [STAGE.dense, *map(STAGE.expert, range(NUM_EXPERTS))]
    assert sum(part.num_bytes for part in parts) == STAGE.num_bytes
    spans = sorted((s.offset, s.offset + s.num_bytes) for part in parts for p in part.parameters for s in p.slices)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert [p.name for p in STAGE.dense.parameters] == ["bias"]


@pytest.mark.parametrize("index", range(NUM_EXPERTS))
def test_an_expert_is_a_stack_of_one_at_its_place_in_the_file(index: int) -> None:
    gate, down = STAGE.expert(index).parameters
    assert gate.shape == down.shape == (1, ROWS, COLUMNS)
    assert gate.pieces == (GATE.pieces[index],)
    assert down.slices[0].offset == DOWN.slices[0].offset + index * MATRIX_BYTES
    assert down.slices[0].shape == (1, ROWS, COLUMNS)


def test_scales_of_its_own_travel_with_an_expert() -> None:
    pieces = [matrix(f"w{e}", 4096 + e * MATRIX_BYTES, factors(f"s{e}", MIB_APART + 4 * e)) for e in range(NUM_EXPERTS)]
    stage = stage_of(parameter("gate", pieces))
    assert [s.name for s in stage.expert(4).parameters[0].slices] == ["w4", "s4"]


UNPAGEABLE = {
    "one scale for two experts": [parameter(
        "gate", [matrix(f"w{e}", 4096 + e * MATRIX_BYTES, factors(f"s{e // 2}", MIB_APART)) for e in range(NUM_EXPERTS)]
    )],
    "the same bytes for all experts": [parameter("gate", [matrix("w", 4096)] * NUM_EXPERTS)],
    "tied to a dense parameter": [GATE, replace(GATE, name="shared", is_experts=False)],
    "fewer than the layer's experts": [parameter("gate", [matrix("w0", 4096)])],
    "experts of the class's own code": [replace(GATE, is_experts=False)],
}  # fmt: skip


@pytest.mark.parametrize("why", UNPAGEABLE)
def test_what_cannot_be_read_by_expert_stays_whole(why: str) -> None:
    stage = stage_of(*UNPAGEABLE[why])
    shape = shape_with(stage)
    assert stage.dense == stage
    assert not pageable_stages(shape)
    assert unpageable_stacks(shape) == tuple(p.name for p in stage.parameters if p.is_experts)


def test_one_unpageable_stack_leaves_the_others_pageable() -> None:
    whole = parameter("gate", [matrix("w", 8 * MIB_APART)] * NUM_EXPERTS)
    shape = shape_with(stage_of(whole, DOWN))
    assert pageable_stages(shape) == {1}
    assert unpageable_stacks(shape) == ("gate",)


def test_paged_stages_lose_their_experts_and_the_others_nothing() -> None:
    shape = shape_with(STAGE)
    dense = dense_shape(shape, pageable_stages(shape))
    assert dense.stages[1] == STAGE.dense
    assert dense.stages[:1] + dense.stages[2:] == shape.stages[:1] + shape.stages[2:]
    assert dense_shape(shape, ()).stages == shape.stages


@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (160, 8), (512, 10), (4, 4)])
def test_expected_hits_grow_from_one_tokens_choices_to_all_experts(num_experts: int, per_token: int) -> None:
    hits = [expected_hits(num_experts, per_token, num_tokens) for num_tokens in (0, 1, 2, 64, 100_000)]
    assert hits[0] == 0
    assert hits[1] == pytest.approx(per_token)
    assert hits == sorted(hits)
    assert hits[-1] == pytest.approx(num_experts)


ONE, FEW, MANY = (1, 1), (1, 40), (1, 64)  # requests, tokens: 8, 139 and 154 of 160 experts
LANES, FULL_LANES = (8, 4), (8, 64)  # 30 eight times; 154 eight times


@pytest.mark.parametrize(
    ("prefill", "decode", "layer_fits", "expected"),
    [
        (None, ONE, True, ExpertPaging.hit),
        (None, ONE, False, ExpertPaging.hit),
        (None, FEW, True, ExpertPaging.hit),
        (None, MANY, True, ExpertPaging.off),
        (None, MANY, False, ExpertPaging.all),
        (None, LANES, True, ExpertPaging.off),
        (None, LANES, False, ExpertPaging.hit),
        (None, FULL_LANES, False, ExpertPaging.all),
        ((4, *MANY), ONE, True, ExpertPaging.hit),  # 20 passes of 8 pay for 4 of 154
        ((4, *FULL_LANES), (8, 1), True, ExpertPaging.off),  # 8 x 154 in each pass of 8 lanes of prompts
        ((4, *FULL_LANES), (8, 1), False, ExpertPaging.hit),
        ((1, *FULL_LANES), (2, 1), True, ExpertPaging.hit),
        ((400, *MANY), ONE, True, ExpertPaging.off),
        ((400, *MANY), ONE, False, ExpertPaging.all),
    ],
)
def test_paging_is_chosen_by_what_all_passes_read(
    prefill: tuple[int, int, int] | None, decode: tuple[int, int], layer_fits: bool, expected: ExpertPaging
) -> None:
    phases = [
        ExpertPhase(num_passes=passes, runs_per_pass=requests, num_tokens=tokens)
        for passes, requests, tokens in [prefill or (0, 0, 0), (20, *decode)]
    ]
    chosen = choose_paging(num_experts=160, num_experts_per_token=8, phases=phases, layer_fits=layer_fits)
    assert chosen is expected


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize(("max_new_tokens", "paging"), [(2, ExpertPaging.off), (400, ExpertPaging.hit)])
def test_long_prompts_read_whole_layers_and_long_answers_the_experts_they_visit(
    max_new_tokens: int, paging: ExpertPaging, admission: Admission
) -> None:
    """Two lanes, of one row each: a prompt visits all 6 experts in each, a token 2."""
    policy = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=1, num_micro_batches=2, admission=admission)
    config = RuntimeConfig(offload=OffloadConfig(tier=Tier.nvme, resident_layers=0), policy=policy)
    found = plan_run(shape_with(STAGE), config, Budgets(host_bytes=GIB), sizes_of([200] * 4, max_new_tokens))
    assert found.placement.paging is paging


@pytest.mark.parametrize(("reads", "copies"), [(True, False), (True, True), (False, True)])
def test_slots_hold_any_expert_and_are_counted_where_they_lie(reads: bool, copies: bool) -> None:
    in_host = frozenset(() if reads else (1, 2))
    outer = Walk(num_stages=4, streamed=(1, 2), num_slots=1, in_host=in_host, copies=copies)
    paged = [ExpertSizes.from_stage(STAGE)]
    pages = ExpertPages.from_shape(shape_with(STAGE), {1})
    walk = pages.walk(outer, 3)
    sizes = [slot_layout(page).num_bytes for page in pages.pages]
    assert len(sizes) == NUM_EXPERTS == len(walk.streamed)
    assert slot_entry(paged, 3).num_bytes == 3 * max(sizes)
    host = sum(entry.num_bytes for entry in host_entries({1: paged[0]}, outer, lambda entry: entry))
    assert host >= (walk.num_staging_slots * max(sizes) if reads else sum(sizes)) * copies
    assert bool(host) == copies


def test_batched_experts_cost_by_the_token_of_all_lanes() -> None:
    shape = shape_with(STAGE)
    one, three = (sum(e.num_bytes for e in batch_entries(shape, n)) for n in (10, 30))
    assert three == 3 * one > 10 * 5 * shape.hidden_size * shape.compute_dtype_bytes
    assert sum(e.num_bytes for e in batch_entries(shape, 0)) == 0


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 8, GROUPED_VISITS // 2, GROUPED_VISITS, 3 * GROUPED_VISITS])
def test_experts_that_run_at_once_are_counted_beyond_what_is_counted_anyway(num_tokens: int, is_batched: bool) -> None:
    shape, choices, inner = toy_mixture(), 2, LAYER_ROWS // 8
    num_visits = min(num_tokens * choices, max(num_tokens, GROUPED_VISITS))
    for few in range(1, num_tokens + 1):
        if multiplies_all_experts(few, choices, max(stage.num_experts for stage in shape.stages)):
            num_visits = max(num_visits, few * max(stage.num_experts for stage in shape.stages))
    needed = num_visits * (6 * shape.hidden_size + 4 * inner)
    counted = (5 * shape.hidden_size if is_batched else 0) + (4 if is_batched else 3) * shape.intermediate_size
    (entry,) = visit_entries(shape, num_tokens, is_batched=is_batched)
    assert entry.num_bytes == max(0, needed - num_tokens * counted) * shape.compute_dtype_bytes
    assert visit_entries(toy_shape(), num_tokens, is_batched=is_batched) == ()
