"""Expert paging, which reads experts one by one: the stages that support it, when it saves time, and its memory.

The slot of a paged stage, the buffer into which it is read, holds all weights except experts. Its experts have slots
for one expert each. A **walk** describes the path of a pass: stages, slots and transfers. Paged experts are the stages
of a second walk. A **hit** is an expert to which at least one token is routed; a **visit** is one expert computed for
one token. A **kept** expert stays in compute memory. A lane is a micro-batch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...config.settings import ExpertPaging
from ..schedule.walk import Walk
from ..shape.extents import pinned_bytes
from ..shape.model import ModelShape
from ..shape.numbers import Numbers
from ..shape.shapes import Stage
from ..shape.stage_sizes import ExpertSizes
from .ledger import Entry
from .memory import INNER_VECTORS, exchanged_elements, visit_elements

# Up to this share of hit experts, reading them one by one takes less time than one sequential read of all experts.
WORTHWHILE_SHARE = 0.9
EXPERT_SLOTS, EXPERT_SLOTS_BYTES = 32, 64 << 20  # most expert slots for which a CPU uses memory that is left
NUM_STAGING_SLOTS = 2  # pinned host buffers between disk and device, for one expert each
FULL_TOKENS = 64  # up to this many tokens, reading all experts takes longer than multiplying by them
GROUPED_VISITS = 2048  # maximum visits per grouped product on an accelerator, or a lane's tokens if those are more
# Temporary vectors per token of hidden size, and of intermediate size, for experts batched over all lanes.
RUNNING_HIDDEN, RUNNING_INNER = 5, 4
MAX_HIT_GROUPS = 16  # experts with about equal counts of hits are grouped to estimate how often they are hit
INDEX_BYTES = 8  # torch indexes experts and tokens with int64


def expected_hits(num_experts: int, num_experts_per_token: int, num_tokens: Numbers) -> Numbers:
    """Returns the expected number of experts hit by `num_tokens` under uniform routing. Trained routers hit fewer."""
    missed = (1 - num_experts_per_token / num_experts) ** num_tokens
    return num_experts * (1 - missed)  # pyright: ignore[reportReturnType] - a float's power is a float


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """How often decode passes hit each expert, as counted while a run goes.

    A **run** of a stage's experts is one lane's, or that of all lanes if experts are batched.
    """

    num_tokens: float  # of a run, on average
    hit_rates: tuple[float, ...]  # by page (see `ExpertPages`): the share of runs that hit the expert

    @staticmethod
    def from_counts(num_hits: Sequence[float], num_runs: Sequence[float], num_tokens: float) -> "Routing | None":
        """Estimates the rates from counts by page: of hits, and of runs of the page's stage. None without runs.

        Of few runs, counts vary by chance: the experts hit most so far will be hit less. So the rate of experts with
        equal counts is the one that is found if each run in turn is left out: the share of those with `k` hits in the
        other runs that this run hits. For an even router, it is the mean.
        """
        runs = np.asarray(num_runs, float)
        if not len(runs) or not runs.all():
            return None
        count = max(1, round(float(runs.max())))
        hits = np.clip(np.rint(np.asarray(num_hits, float) * count / runs), 0, count).astype(int)
        experts, others = np.bincount(hits, minlength=count + 1), np.arange(count)  # by hits of all, of the other runs
        group = others * min(count, MAX_HIT_GROUPS) // count
        hit, missed, members = (
            np.bincount(group, weights)
            for weights in ((others + 1) * experts[1:], (count - others) * experts[:-1], None)
        )
        centers, pooled = np.bincount(group, others) / members, list[tuple[float, float, int]]()
        known = hit + missed > 0
        for part in zip(hit[known], (hit + missed)[known], [1] * int(known.sum()), strict=True):
            while pooled and pooled[-1][0] * part[1] > part[0] * pooled[-1][1]:  # more hits never mean a lower rate
                last = pooled.pop()
                part = (last[0] + part[0], last[1] + part[1], last[2] + part[2])
            pooled.append(part)
        rising = np.repeat([num_hit / num_all for num_hit, num_all, _ in pooled], [size for _, _, size in pooled])
        rates = np.interp(hits * (count - 1) / count, centers[known], rising)
        return Routing(num_tokens=num_tokens, hit_rates=tuple(rates.tolist()))

    def hit_share(self, num_tokens: float, kept_share: float = 0.0) -> float:
        """Returns the share of a stage's experts that a run of `num_tokens` hits, on average over the stages.

        Leaves out the `kept_share` of all experts that are hit most.
        """
        rates = self._descending[round(kept_share * len(self.hit_rates)) :]
        hit = 1 - (1 - rates) ** (num_tokens / self.num_tokens)
        return float(hit.sum()) / len(self.hit_rates)

    @cached_property
    def _descending(self) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return np.sort(np.clip(np.asarray(self.hit_rates), 0.0, 1.0))[::-1]


@dataclass(frozen=True, kw_only=True)
class ExpertPhase:
    """A phase of `num_passes` equal passes, as seen by the experts of one layer."""

    num_passes: float
    runs_per_pass: int  # how often a pass runs the experts: once per lane, or 1 if batched over all lanes
    num_tokens: int  # per run

    @property
    def total_runs(self) -> float:
        return self.num_passes * self.runs_per_pass

    def hits(self, num_experts: int, num_experts_per_token: int) -> float:
        """Returns the expected hits of all runs together. An expert counts once for each run that hits it."""
        return self.total_runs * expected_hits(num_experts, num_experts_per_token, self.num_tokens)


def choose_paging(
    *, num_experts: int, num_experts_per_token: int, phases: Sequence[ExpertPhase], layer_fits: bool
) -> ExpertPaging:
    """Resolves `offload.expert_paging=auto` for a layer, from the bytes that all passes of a run read.

    - `hit` reads only hit experts. It is chosen if it saves at least a tenth of the bytes.
    - `off` reads the whole layer once per pass, before the layer runs. It needs slots that hold a layer (`layer_fits`).
    - `all` reads all experts again for each lane, but without waiting for the routers.
    """
    num_hits = sum(phase.hits(num_experts, num_experts_per_token) for phase in phases)
    num_passes = sum(phase.num_passes for phase in phases)
    num_runs = sum(phase.total_runs for phase in phases)
    if num_hits < WORTHWHILE_SHARE * num_experts * num_passes:
        return ExpertPaging.hit
    if layer_fits:
        return ExpertPaging.off
    return ExpertPaging.hit if num_hits < WORTHWHILE_SHARE * num_experts * num_runs else ExpertPaging.all


def pageable_stages(shape: ModelShape) -> frozenset[int]:
    """Returns the stages with experts that can be read one by one."""
    return frozenset(stage.index for stage in shape.stages if stage.experts)


def dense_shape(shape: ModelShape, paged: Collection[int]) -> ModelShape:
    """Returns the model without the experts of `paged` stages."""
    return replace(shape, stages=tuple(stage.dense if stage.index in paged else stage for stage in shape.stages))


@dataclass(frozen=True, kw_only=True)
class ExpertPages:
    """The experts of all paged stages, numbered: expert e of stage s is page `first_page[s] + e`."""

    pages: tuple[Stage, ...]
    first_page: Mapping[int, int]

    @staticmethod
    def from_shape(shape: ModelShape, paged: Collection[int]) -> "ExpertPages":
        pages: list[Stage] = []
        first_page = {}
        for stage in (shape.stages[index] for index in sorted(paged)):
            first_page[stage.index] = len(pages)
            pages += [stage.expert(expert) for expert in range(stage.num_experts)]
        return ExpertPages(pages=tuple(pages), first_page=first_page)

    def page(self, stage: int, expert: int) -> int:
        return self.first_page[stage] + expert

    def name(self, page: int) -> str:
        """Returns the name of a page, such as "7 expert 3"."""
        stage = self.pages[page].index
        return f"{stage} expert {page - self.first_page[stage]}"

    def as_shape(self, shape: ModelShape) -> ModelShape:
        """Returns `shape` with the pages as its stages. Code that streams stages can then stream experts."""
        return replace(shape, stages=self.pages)

    def in_host(self, outer: Walk) -> frozenset[int]:
        """Returns the pages in host memory: those of stages that the walk of stages, `outer`, has there."""
        return frozenset(number for number, page in enumerate(self.pages) if page.index in outer.in_host)

    def walk(self, outer: Walk, num_slots: int) -> Walk:
        """Returns the walk of the pages. `outer`: the walk of the stages."""
        in_host = self.in_host(outer)
        reads_disk = len(in_host) < len(self.pages)
        return Walk(
            num_stages=len(self.pages),
            streamed=tuple(range(len(self.pages))),
            num_slots=num_slots,
            num_staging_slots=NUM_STAGING_SLOTS if reads_disk and outer.copies else 0,
            in_host=in_host,
            copies=outer.copies,
        )


def slot_entry(paged: Collection[ExpertSizes], num_slots: int) -> Entry:
    """Returns the compute memory of expert slots. `paged`: expert sizes of each paged stage."""
    size = max(stage.slot_bytes for stage in paged)
    equation = f"{num_slots} x {size:,} B, the largest expert"
    return Entry(name="expert slots", num_bytes=num_slots * size, equation=equation)


def kept_entry(paged: Collection[ExpertSizes], num_kept: int) -> Entry:
    """Returns the compute memory of experts that stay there, each in a slot of the largest expert's size."""
    size, num_experts = max(stage.slot_bytes for stage in paged), sum(stage.num_experts for stage in paged)
    equation = f"{num_kept:,} of {num_experts:,} experts x {size:,} B"
    return Entry(name="kept experts", num_bytes=num_kept * size, equation=equation)


def host_entries(paged: Mapping[int, ExpertSizes], outer: Walk, share: Callable[[Entry], Entry]) -> tuple[Entry, ...]:
    """Returns the host memory for paged experts; empty without an accelerator.

    Experts that are read from disk need staging slots. All others are in pinned memory, and `share` scales their entry
    by the processes that share it. `paged`: expert sizes by stage. `outer`: the walk of the stages.
    """
    if not outer.copies:
        return ()
    from_disk = [sizes for stage, sizes in paged.items() if stage not in outer.in_host]
    in_host = [sizes for stage, sizes in paged.items() if stage in outer.in_host]
    entries = list[Entry]()
    if from_disk:
        size = pinned_bytes(max(stage.slot_bytes for stage in from_disk))
        equation = f"{NUM_STAGING_SLOTS} x {size:,} B, pinned"
        entries.append(Entry(name="expert staging slots", num_bytes=NUM_STAGING_SLOTS * size, equation=equation))
    if in_host:
        num_experts = sum(stage.num_experts for stage in in_host)
        num_bytes = sum(stage.pinned_bytes for stage in in_host)
        entries.append(share(Entry(name="experts", num_bytes=num_bytes, equation=f"{num_experts} experts, pinned")))
    return tuple(entries)


def batch_entries(shape: ModelShape, num_tokens: int) -> tuple[Entry, ...]:
    """Returns the compute memory for experts that run once for the `num_tokens` of all lanes.

    Each waiting lane keeps its residual, the input of the experts, the output of shared experts and the routing.
    Running experts take most memory if all tokens visit the same one: input, gate and up, their product twice, output
    and weighted output.
    """
    size = shape.compute_dtype_bytes
    num_experts = max((stage.num_experts for stage in shape.stages), default=0)
    choices = max((stage.num_experts_per_token for stage in shape.stages), default=0)
    # Bytes per token.
    waiting = (3 * shape.hidden_size + num_experts) * size + choices * (size + INDEX_BYTES)
    vectors = RUNNING_HIDDEN * shape.hidden_size + RUNNING_INNER * shape.intermediate_size + exchanged_elements(shape)
    running = vectors * size + choices * 3 * (size + INDEX_BYTES)
    return tuple(
        Entry(name=name, num_bytes=num_tokens * each, equation=f"{num_tokens:,} tokens of all lanes x {each:,} B")
        for name, each in (("waiting lanes", waiting), ("batched experts", running))
    )


def multiplies_all_experts(num_tokens: int, num_choices: int, num_experts: int) -> bool:
    """True if an accelerator without a grouped kernel multiplies the tokens by all experts, hit or not.

    Few tokens hit most experts anyway, and multiplying by the missed ones takes less time than waiting until the host
    has read the routing. `num_choices`: experts per token.
    """
    return (
        num_tokens <= FULL_TOKENS
        and num_tokens * num_choices >= num_experts
        and num_tokens * num_experts <= GROUPED_VISITS
    )


def visit_entries(shape: ModelShape, num_tokens: int, *, is_batched: bool) -> tuple[Entry, ...]:
    """Returns the memory of experts that run in one grouped product on an accelerator, for `num_tokens`.

    Excludes vectors that are counted elsewhere: by `batch_entries` if `is_batched`, else by the lane's activations.
    """
    choices = max((stage.num_experts_per_token for stage in shape.stages), default=0)
    if not choices:
        return ()
    size = shape.compute_dtype_bytes
    experts = max(stage.num_experts for stage in shape.stages)
    num_full = min(num_tokens, FULL_TOKENS, GROUPED_VISITS // experts)  # tokens multiplied by all experts
    num_full_visits = num_full * experts if multiplies_all_experts(num_full, choices, experts) else 0
    num_visits = max(min(num_tokens * choices, max(num_tokens, GROUPED_VISITS)), num_full_visits)
    per_visit = visit_elements(shape.hidden_size, shape.expert_inner_size)
    # Elements per token that are counted elsewhere.
    counted = RUNNING_INNER * shape.intermediate_size + RUNNING_HIDDEN * shape.hidden_size if is_batched else 0
    if not is_batched and not shape.has_fused_gates:
        counted = INNER_VECTORS * shape.intermediate_size
    return (
        Entry(
            name="expert activations",
            num_bytes=max(0, num_visits * per_visit - num_tokens * counted) * size,
            equation=f"({num_visits:,} visits x {per_visit:,} - {num_tokens:,} tokens x {counted:,} counted) "
            f"x {size} B",
        ),
    )
