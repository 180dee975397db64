"""Expert paging: experts read one by one; which stages support it, when it pays, and the memory it takes.

The slot of a paged stage holds its dense part only. Its experts are stages of a second walk, with slots for one expert.
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
from .memory import INNER_VECTORS, exchanged_elements, visit_elements

WORTHWHILE_SHARE = 0.9  # of the experts: reading fewer one by one beats one sequential read of all
NUM_STAGING_SLOTS = 2
FULL_TOKENS = 64  # up to this many tokens, reading all experts takes longer than multiplying by them
GROUPED_VISITS = 2048  # visits per grouped product on an accelerator, or a lane's tokens if that is more
RUNNING_HIDDEN, RUNNING_INNER = 5, 4  # temporary vectors per token of experts batched over all lanes
INDEX_BYTES = 8  # torch numbers experts and tokens in int64


def expected_hits(num_experts: int, num_experts_per_token: int, num_tokens: Numbers) -> Numbers:
    """Returns the expected distinct experts of `num_tokens` under uniform routing. Trained routers hit fewer."""
    missed = (1 - num_experts_per_token / num_experts) ** num_tokens
    return num_experts * (1 - missed)  # pyright: ignore[reportReturnType] - the power of a number is one


@dataclass(frozen=True, kw_only=True)
class ExpertPhase:
    """Equal passes. `runs_per_pass`: runs of a layer's experts (lanes; 1 if batched), for `num_tokens` each."""

    num_passes: float
    runs_per_pass: int
    num_tokens: int

    @property
    def total_runs(self) -> float:
        return self.num_passes * self.runs_per_pass

    def hits(self, num_experts: int, num_experts_per_token: int) -> float:
        """Returns the experts hit over all runs."""
        return self.total_runs * expected_hits(num_experts, num_experts_per_token, self.num_tokens)


def choose_paging(
    *, num_experts: int, num_experts_per_token: int, phases: Sequence[ExpertPhase], layer_fits: bool
) -> ExpertPaging:
    """Resolves `offload.expert_paging=auto` for a layer, from the bytes that all passes of a run read.

    `hit` reads only hit experts; chosen if it saves a tenth of the bytes. Otherwise `off` reads the whole layer once
    per pass, ahead of its turn. If the slots cannot hold a layer, `all` reads all experts for each lane, without
    waiting for the routers.
    """
    hits = sum(phase.hits(num_experts, num_experts_per_token) for phase in phases)
    layers = sum(phase.num_passes for phase in phases)
    runs = sum(phase.total_runs for phase in phases)
    if hits < WORTHWHILE_SHARE * num_experts * layers:
        return ExpertPaging.hit
    if layer_fits:
        return ExpertPaging.off
    return ExpertPaging.hit if hits < WORTHWHILE_SHARE * num_experts * runs else ExpertPaging.all


def pageable_stages(shape: ModelShape) -> frozenset[int]:
    return frozenset(stage.index for stage in shape.stages if stage.experts)


def dense_shape(shape: ModelShape, paged: Collection[int]) -> ModelShape:
    """Returns the model with `paged` stages without their experts."""
    return replace(shape, stages=tuple(stage.dense if stage.index in paged else stage for stage in shape.stages))


@dataclass(frozen=True, kw_only=True)
class ExpertPages:
    """The experts of paged stages as pages: expert e of stage s is page `first_page[s] + e`."""

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
        """Returns `shape` with the pages as its stages, to stream them."""
        return replace(shape, stages=self.pages)

    def in_host(self, outer: Walk) -> frozenset[int]:
        return frozenset(number for number, page in enumerate(self.pages) if page.index in outer.in_host)

    def walk(self, outer: Walk, num_slots: int) -> Walk:
        """Returns the walk of the pages, given the walk of the stages."""
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
    size = max(stage.slot_bytes for stage in paged)
    equation = f"{num_slots} x {size:,} B, the largest expert"
    return Entry(name="expert slots", num_bytes=num_slots * size, equation=equation)


def host_entries(paged: Mapping[int, ExpertSizes], outer: Walk, share: Callable[[Entry], Entry]) -> tuple[Entry, ...]:
    """Returns the host memory for experts with an accelerator: staging slots for those read from disk, and pinned
    memory for the others, scaled by `share`."""
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
    """Returns the compute memory for experts batched over `num_tokens` of all lanes.

    Waiting lanes hold the residual, the experts' input, the shared experts' output and the routing. Running
    experts need most if all tokens visit one: input, gate and up, their product twice, output and weighted output.
    """
    size = shape.compute_dtype_bytes
    num_experts = max((stage.num_experts for stage in shape.stages), default=0)
    choices = max((stage.num_experts_per_token for stage in shape.stages), default=0)
    waiting = (3 * shape.hidden_size + num_experts) * size + choices * (size + INDEX_BYTES)
    vectors = RUNNING_HIDDEN * shape.hidden_size + RUNNING_INNER * shape.intermediate_size + exchanged_elements(shape)
    running = vectors * size + choices * 3 * (size + INDEX_BYTES)
    return tuple(
        Entry(name=name, num_bytes=num_tokens * row, equation=f"{num_tokens:,} tokens of all lanes x {row:,} B")
        for name, row in (("waiting lanes", waiting), ("batched experts", running))
    )


def multiplies_all_experts(num_tokens: int, num_choices: int, num_experts: int) -> bool:
    """True if an accelerator without a grouped kernel multiplies the tokens by all experts: most are hit anyway, and
    the rest take less time than waiting for the routing."""
    return (
        num_tokens <= FULL_TOKENS
        and num_tokens * num_choices >= num_experts
        and num_tokens * num_experts <= GROUPED_VISITS
    )


def visit_entries(shape: ModelShape, num_tokens: int, *, is_batched: bool) -> tuple[Entry, ...]:
    """Returns the memory of experts run together on an accelerator, minus what a lane's activations or `batch_entries`
    count already."""
    choices = max((stage.num_experts_per_token for stage in shape.stages), default=0)
    if not choices:
        return ()
    size = shape.compute_dtype_bytes
    experts = max(stage.num_experts for stage in shape.stages)
    num_full = min(num_tokens, FULL_TOKENS, GROUPED_VISITS // experts)  # tokens multiplied by all experts
    num_full_visits = num_full * experts if multiplies_all_experts(num_full, choices, experts) else 0
    num_visits = max(min(num_tokens * choices, max(num_tokens, GROUPED_VISITS)), num_full_visits)
    numbers = visit_elements(shape.hidden_size, shape.expert_inner_size)
    counted = RUNNING_INNER * shape.intermediate_size + RUNNING_HIDDEN * shape.hidden_size if is_batched else 0
    if not is_batched and not shape.has_fused_gates:
        counted = INNER_VECTORS * shape.intermediate_size
    return (
        Entry(
            name="expert activations",
            num_bytes=max(0, num_visits * numbers - num_tokens * counted) * size,
            equation=f"({num_visits:,} visits x {numbers:,} - {num_tokens:,} tokens x {counted:,} counted) x {size} B",
        ),
    )
