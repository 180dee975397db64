"""Experts that are read page by page: which stages allow it, when it pays, and what it takes in memory.

A paged stage's slot holds its dense part alone. Each expert of it is a stage of a walk of its own, through slots of one
expert each.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...config.settings import ExpertPaging
from ..schedule.walk import Walk
from ..shape.extents import pinned_bytes
from ..shape.model import ModelShape
from ..shape.numbers import Numbers
from ..shape.shapes import Stage
from ..shape.stage_sizes import ExpertSizes
from .ledger import Entry
from .memory import LANE_INNER, exchanged_elements, visit_elements

WORTHWHILE_SHARE = 0.9  # of the experts: reading fewer one by one beats reading all in one run
NUM_STAGING_SLOTS = 2
FULL_TOKENS = 64  # by all experts: fewer operations for a byte of weights than accelerators have time for
GROUPED_VISITS = 2048  # that an accelerator's experts take at once, or as many as a lane has tokens
RUNNING_HIDDEN, RUNNING_INNER = 5, 4  # vectors of a token at experts that run for all lanes
INDEX_BYTES = 8  # torch numbers experts and tokens in int64


def expected_hits(num_experts: int, num_experts_per_token: int, num_tokens: Numbers) -> Numbers:
    """Distinct experts that `num_tokens` visit when each chooses its experts evenly and on its own. Trained routers
    are less even and hit fewer."""
    missed = (1 - num_experts_per_token / num_experts) ** num_tokens
    return num_experts * (1 - missed)  # pyright: ignore[reportReturnType] - the power of a number is one


@dataclass(frozen=True, kw_only=True)
class ExpertPhase:
    """Passes that are alike: in each, a layer's experts are asked for `num_requests` times, for `num_tokens` each time.
    Module batching asks once, for all lanes."""

    num_passes: float
    num_requests: int
    num_tokens: int

    @property
    def total_requests(self) -> float:
        """How often a layer's experts are asked for in all."""
        return self.num_passes * self.num_requests

    def hits(self, num_experts: int, num_experts_per_token: int) -> float:
        """Experts that are hit, each as often as it is."""
        return self.total_requests * expected_hits(num_experts, num_experts_per_token, self.num_tokens)


def choose_paging(
    *, num_experts: int, num_experts_per_token: int, phases: Sequence[ExpertPhase], layer_fits: bool
) -> ExpertPaging:
    """What `offload.expert_paging=auto` means for a layer, from what all passes of a run read of it.

    Only hit experts are read where that leaves out a tenth of the layer's bytes. Where it doesn't, the whole layer is
    read once in each pass, ahead of its turn; and if the slots cannot hold it, all its experts one by one for each that
    asks, which at least need not wait for the routers.
    """
    hits = sum(phase.hits(num_experts, num_experts_per_token) for phase in phases)  # experts read
    layers = sum(phase.num_passes for phase in phases)
    requests = sum(phase.total_requests for phase in phases)
    if hits < WORTHWHILE_SHARE * num_experts * layers:
        return ExpertPaging.hit
    if layer_fits:
        return ExpertPaging.off
    return ExpertPaging.hit if hits < WORTHWHILE_SHARE * num_experts * requests else ExpertPaging.all


def pageable_stages(shape: ModelShape) -> frozenset[int]:
    return frozenset(stage.index for stage in shape.stages if stage.experts)


def dense_shape(shape: ModelShape, paged: Collection[int]) -> ModelShape:
    """The model as its slots see it: paged stages without their experts."""
    return replace(shape, stages=tuple(stage.dense if stage.index in paged else stage for stage in shape.stages))


@dataclass(frozen=True, kw_only=True)
class ExpertPages:
    """The experts of paged stages, numbered through: expert e of stage s is page `first_page[s] + e`."""

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
        """The name of a page, as "7 expert 3"."""
        stage = self.pages[page].index
        return f"{stage} expert {page - self.first_page[stage]}"

    def as_shape(self, shape: ModelShape) -> ModelShape:
        """`shape` with the pages in the place of its stages, so that they can be streamed like stages."""
        return replace(shape, stages=self.pages)

    def in_host(self, outer: Walk) -> frozenset[int]:
        """The pages of stages that host memory holds."""
        return frozenset(page for page, each in enumerate(self.pages) if each.index in outer.in_host)

    def walk(self, outer: Walk, num_slots: int) -> Walk:
        """How pages travel where stages travel as `outer` says."""
        in_host = self.in_host(outer)
        reads = len(in_host) < len(self.pages)
        return Walk(
            num_stages=len(self.pages),
            streamed=tuple(range(len(self.pages))),
            num_slots=num_slots,
            num_staging_slots=NUM_STAGING_SLOTS if reads and outer.copies else 0,
            in_host=in_host,
            copies=outer.copies,
        )


def slot_entry(paged: Collection[ExpertSizes], num_slots: int) -> Entry:
    """What the slots of experts take in the compute device's memory."""
    size = max(stage.slot_bytes for stage in paged)
    return Entry(
        name="expert slots", num_bytes=num_slots * size, equation=f"{num_slots} x {size:,} B, the largest expert"
    )


def host_entries(paged: Mapping[int, ExpertSizes], outer: Walk, share: Callable[[Entry], Entry]) -> tuple[Entry, ...]:
    """What the experts of `paged` stages take in host memory in front of an accelerator: staging slots for those that
    are read, and the others themselves, which live there, and of which a `share` counts."""
    if not outer.copies:
        return ()
    read = [sizes for stage, sizes in paged.items() if stage not in outer.in_host]
    held = [sizes for stage, sizes in paged.items() if stage in outer.in_host]
    entries = list[Entry]()
    if read:
        size = pinned_bytes(max(stage.slot_bytes for stage in read))
        equation = f"{NUM_STAGING_SLOTS} x {size:,} B, pinned"
        entries.append(Entry(name="expert staging slots", num_bytes=NUM_STAGING_SLOTS * size, equation=equation))
    if held:
        num_experts, num_bytes = sum(stage.num_experts for stage in held), sum(stage.pinned_bytes for stage in held)
        entries.append(share(Entry(name="experts", num_bytes=num_bytes, equation=f"{num_experts} experts, pinned")))
    return tuple(entries)


def batch_entries(shape: ModelShape, num_tokens: int) -> tuple[Entry, ...]:
    """Module batching of so many tokens of all lanes, in the compute device's memory. Lanes wait at their experts with
    the residual, the experts' input, shared experts' output and the routing; then one layer's experts run over all
    their tokens.

    The worst case has one expert visited by all tokens: its input, gate and up, their product twice, output and
    weighted output.
    """
    size = shape.compute_dtype_bytes
    num_experts = max((stage.num_experts for stage in shape.stages), default=0)
    choices = max((stage.num_experts_per_token for stage in shape.stages), default=0)
    waiting = (3 * shape.hidden_size + num_experts) * size + choices * (size + INDEX_BYTES)
    vectors = RUNNING_HIDDEN * shape.hidden_size + RUNNING_INNER * shape.intermediate_size + exchanged_elements(shape)
    running = vectors * size + choices * 3 * (size + INDEX_BYTES)
    return (
        Entry(
            name="lanes at their experts",
            num_bytes=num_tokens * waiting,
            equation=f"{num_tokens:,} tokens of all lanes x {waiting:,} B",
        ),
        Entry(
            name="batched experts",
            num_bytes=num_tokens * running,
            equation=f"{num_tokens:,} tokens of all lanes x {running:,} B",
        ),
    )


def multiplies_all_experts(num_tokens: int, num_choices: int, num_experts: int) -> bool:
    """Whether an accelerator multiplies tokens by all experts where it has no kernel for groups: most are hit, and the
    rest costs less than to wait for which."""
    return (
        num_tokens <= FULL_TOKENS
        and num_tokens * num_choices >= num_experts
        and num_tokens * num_experts <= GROUPED_VISITS
    )


def visit_entries(shape: ModelShape, num_tokens: int, *, is_batched: bool) -> tuple[Entry, ...]:
    """What experts that run at once for so many tokens take in an accelerator's memory beyond what a lane's activations
    count for its feed-forward, or module batching for one expert that all tokens visit."""
    choices = max((stage.num_experts_per_token for stage in shape.stages), default=0)
    if not choices:
        return ()
    size = shape.compute_dtype_bytes
    experts = max(stage.num_experts for stage in shape.stages)
    all_expert_tokens = min(num_tokens, FULL_TOKENS, GROUPED_VISITS // experts)  # tokens, by all experts
    all_expert_visits = (
        all_expert_tokens * experts if multiplies_all_experts(all_expert_tokens, choices, experts) else 0
    )
    num_visits = max(min(num_tokens * choices, max(num_tokens, GROUPED_VISITS)), all_expert_visits)
    numbers = visit_elements(shape.hidden_size, shape.expert_inner_size)
    counted = RUNNING_INNER * shape.intermediate_size + RUNNING_HIDDEN * shape.hidden_size if is_batched else 0
    if not is_batched and not shape.has_fused_gates:
        counted = LANE_INNER * shape.intermediate_size
    return (
        Entry(
            name="experts at once",
            num_bytes=max(0, num_visits * numbers - num_tokens * counted) * size,
            equation=f"({num_visits:,} visits x {numbers:,} - {num_tokens:,} tokens x {counted:,} counted) x {size} B",
        ),
    )
