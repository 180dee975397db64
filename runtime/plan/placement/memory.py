"""Memory of lanes and their KV cache: upper bounds from the sizes of model and requests, as entries of a ledger.

A **lane** is a micro-batch in execution; its sequences are packed, or in a **padded lane** left-padded. A **row** is
one sequence of a lane. One lane at a time computes a stage (such as a layer), so activations are counted for one lane.
All other lanes keep hidden states only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...batching.prefixes import PrefixSharing, SharedPrefix
from ...config.settings import MAX_DRAFT_TOKENS
from ...units import MIB, round_up
from ..shape.attention import (
    CHUNK_COLUMNS,
    GATHERED_BYTES,
    AttentionMethod,
    AttentionSizes,
    DeltaRule,
    device_attention_bytes,
)
from ..shape.dtypes import PAGE_TOKENS as PAGE_TOKENS
from ..shape.extents import ALIGNMENT_BYTES
from ..shape.model import ModelShape
from .ledger import Entry

GATHERED_BLOCK_BYTES = 16 * MIB  # disk blocks with rows of embedding tables that are read at once
PANEL_BYTES = 16 * MIB  # maximum of weights that are converted at once for a product
MAX_DEQUANTIZED_ELEMENTS = 1 << 24  # elements per step on a device, see linear/stored.py
# Up to this many rows of all lanes, device kernels multiply 16-bit activations with quantized codes. On an H100 more
# rows are faster with weights dequantized once for all lanes.
FEW_ROWS = 128
DEQUANTIZING_BYTES = 4 * 4 * MAX_DEQUANTIZED_ELEMENTS  # float32 elements and temporaries
INNER_VECTORS = 3  # feed-forward vectors per token: gate, up and their product
HEAD_STATES = 8  # vectors per token of an MTP head before its layer: inputs, norms, and both in one
GATED_ROWS = 512  # tokens per block of our fused feed-forward, see model/fused.py
GROUPED_BYTES = 16 * MIB  # inputs and outputs of a group of experts on a CPU, see model/expert_groups.py
PACKED_INPUT_BYTES = 24 * MIB  # inputs of a product that CPU kernels have copied into their own order
KERNEL_SCRATCH_BYTES = 8 * MIB  # scratch memory of the threads of a CPU kernel
SAMPLING_BYTES = 24 * MIB  # temporaries for a few rows of logits, see sequences/sampler.py
SEARCH_FACTOR = 6  # memory of beam search relative to the logits of the beams scored together: scores and copies
HEAD_SLICE_BYTES = 64 * MIB  # maximum float32 logits of scored tokens computed at once
ALLOCATOR_SLACK_BYTES = 48 * MIB  # measured: heap fragmentation, libraries' buffers (docs/explanation/memory.md)


@dataclass(frozen=True, kw_only=True)
class SequenceSize:
    """The size of one request, in tokens."""

    num_prompt_tokens: int
    max_new_tokens: int
    num_scored: int = 0  # number of prompt tokens to score, counted from the end; above 0, nothing is generated
    prefix: SharedPrefix | None = None  # longest prefix shared with other requests of the run
    num_beams: int = 1  # beams of a search; each is a sequence of the same lane

    @cached_property
    def capacity_tokens(self) -> int:
        """The KV positions of the sequence at its token limit, in whole pages."""
        num_new = 0 if self.num_scored else self.max_new_tokens
        return round_up(self.num_prompt_tokens + num_new, PAGE_TOKENS)

    def num_selected(self, past: int, new: int) -> int:
        """Returns how many tokens need logits in a prefill pass with `new` prompt tokens after `past` earlier ones."""
        first = self.num_prompt_tokens - max(1, self.num_scored)
        return max(0, past + new - max(past, first))

    @staticmethod
    @lru_cache(65536)
    def interned(
        num_prompt_tokens: int,
        max_new_tokens: int,
        num_scored: int = 0,
        prefix: SharedPrefix | None = None,
        num_beams: int = 1,
    ) -> "SequenceSize":
        """Returns the same object for equal sizes: a run may have 100,000 requests, but only a few hundred sizes."""
        return SequenceSize(
            num_prompt_tokens=num_prompt_tokens,
            max_new_tokens=max_new_tokens,
            num_scored=num_scored,
            prefix=prefix,
            num_beams=num_beams,
        )

    def with_prefix(self, prefix: SharedPrefix | None) -> "SequenceSize":
        if prefix is self.prefix:
            return self
        numbers = self.num_prompt_tokens, self.max_new_tokens, self.num_scored
        return SequenceSize.interned(*numbers, prefix, self.num_beams)


MicroBatch = Sequence[SequenceSize]


def kv_tokens(shape: ModelShape, micro_batches: Sequence[MicroBatch], *, among_lanes: bool = False) -> int:
    """Returns the KV positions of a block if every sequence runs to its token limit.

    A padded lane is as wide as its longest prompt plus its longest output; an encoder-decoder caches outputs only. A
    prefix counts once per lane that shares it, in whole pages; with `among_lanes`, it counts once per block.
    """
    if shape.is_packed:
        sizes = [size for lane in micro_batches for size in lane]
        sharing_groups = [sizes] if among_lanes else micro_batches
        return sum(size.capacity_tokens for size in sizes) - sum(map(_spared_positions, sharing_groups))
    return sum(len(lane) * _row_positions(shape, lane) for lane in micro_batches if lane)


def _spared_positions(lane: MicroBatch) -> int:
    """Returns the KV positions that prefix sharing saves: those of all rows minus those that are stored once."""
    shares = prefix_shares(lane)
    if shares is None:
        return 0
    saved_positions = sum(_whole_page_tokens(prefix.num_tokens) for prefix in shares.prefixes if prefix is not None)
    # A prefix is stored without the whole pages of its parent, a shorter prefix.
    stored_positions = sum(
        round_up(prefix.num_tokens, PAGE_TOKENS) - (_whole_page_tokens(parent.num_tokens) if parent is not None else 0)
        for prefix, parent in shares.parents.items()
    )
    return saved_positions - stored_positions


def _whole_page_tokens(num_tokens: int) -> int:
    return num_tokens // PAGE_TOKENS * PAGE_TOKENS


def prefix_shares(lane: MicroBatch) -> PrefixSharing | None:
    """Returns the prefixes shared within a lane, or None."""
    if all(size.prefix is None for size in lane):
        return None
    shares = PrefixSharing.from_prefixes([size.prefix for size in lane])
    return shares if shares.parents else None


def computed_tokens(lane: MicroBatch) -> int:
    """Returns the number of prompt tokens that the lane computes. Shared prefixes count once."""
    shares = prefix_shares(lane)
    return sum(size.num_prompt_tokens for size in lane) - (shares.num_spared() if shares is not None else 0)


def _row_positions(shape: ModelShape, lane: MicroBatch) -> int:
    """Returns the KV positions of a lane's longest row."""
    if shape.is_packed:
        return max(size.capacity_tokens for size in lane)
    if shape.has_encoder:
        return round_up(max(max(size.max_new_tokens, size.num_scored) for size in lane), PAGE_TOKENS)
    return round_up(_prompt_width(lane) + max(size.max_new_tokens for size in lane), PAGE_TOKENS)


def _may_restart(shape: ModelShape, size: SequenceSize) -> bool:
    """True if the sequence may reach the length at which all its keys are recomputed (LongRoPE)."""
    limit = shape.restart_tokens
    return limit is not None and size.num_prompt_tokens < limit < size.num_prompt_tokens + size.max_new_tokens


def _prompt_width(lane: MicroBatch) -> int:
    """Returns the tokens of the longest prompt."""
    return max((size.num_prompt_tokens for size in lane), default=0)


def chunk_columns(num_rows: int, width: int, chunk_tokens: int) -> int:
    """Returns the columns per prefill pass of a padded lane with `num_rows` prompts, `width` tokens wide.

    The last pass may have fewer columns. If there are several passes, none has a single column: recurrent layers would
    treat it as a decode step, which has no padding.
    """
    max_columns = min(width, max(2, chunk_tokens // num_rows))
    candidates = (*range(max_columns, 1, -1), *range(max_columns + 1, width))
    return next((columns for columns in candidates if width % columns != 1), width)


def prompt_columns(shape: ModelShape, num_rows: int, width: int, chunk_tokens: int) -> int:
    """Returns `chunk_columns`, or `width` if the model cannot prefill in chunks."""
    return width if shape.has_whole_prompts else chunk_columns(num_rows, width, chunk_tokens)


def pass_tokens(shape: ModelShape, lane: MicroBatch, prefill_chunk_tokens: int) -> int:
    """Returns the maximum number of tokens of a lane in one pass. Assumes that no prefixes are shared."""
    if not lane:
        return 0
    if shape.is_packed:
        # At a restart (LongRoPE), a pass recomputes all keys of a sequence.
        row_tokens = (
            shape.restart_tokens or 0 if _may_restart(shape, size) else size.num_prompt_tokens for size in lane
        )
        return max(len(lane), min(prefill_chunk_tokens, sum(row_tokens)))
    width = _row_positions(shape, lane) if any(_may_restart(shape, size) for size in lane) else _prompt_width(lane)
    if shape.has_encoder:  # attention is bidirectional, so a prompt cannot be split
        return len(lane) * (width + max(size.num_scored for size in lane))
    return len(lane) * prompt_columns(shape, len(lane), width, prefill_chunk_tokens)


def prefill_passes(shape: ModelShape, lane: MicroBatch, prefill_chunk_tokens: int) -> int:
    """Returns the number of passes that prefill a lane's prompts."""
    tokens = computed_tokens(lane) if shape.is_packed else len(lane) * _prompt_width(lane)
    return -(-tokens // pass_tokens(shape, lane, prefill_chunk_tokens)) if tokens else 0


def head_rows(vocab_size: int) -> int:
    """Returns the number of scored tokens for which logits are computed at once."""
    return max(1, HEAD_SLICE_BYTES // (4 * vocab_size))


def _logits_entry(shape: ModelShape, micro_batches: Sequence[MicroBatch], tokens: Sequence[int]) -> Entry:
    """Returns the entry for logits: one row per sequence of a lane.

    If prompt tokens are scored, it has a slice of their logits and all of their hidden states instead.
    `tokens`: maximum tokens per pass, by lane.
    """
    num_rows = max((len(lane) for lane in micro_batches), default=0)
    pairs = zip(micro_batches, tokens, strict=True)
    num_scored = max((min(in_pass, sum(size.num_scored for size in lane)) for lane, in_pass in pairs), default=0)
    hidden = num_scored * shape.hidden_size * shape.compute_dtype_bytes
    if num_scored:
        num_rows = min(num_scored, head_rows(shape.vocab_size))
    logits = num_rows * shape.vocab_size * 4
    sampling = max(logits, min(2 * logits, SAMPLING_BYTES))
    if (num_beams := max((size.num_beams for lane in micro_batches for size in lane), default=1)) > 1:
        at_once = max(SAMPLING_BYTES, SEARCH_FACTOR * num_beams * shape.vocab_size * 4)
        sampling = max(sampling, min(SEARCH_FACTOR * logits, at_once))
    return Entry(
        name="logits",
        num_bytes=logits + sampling + hidden,
        equation=f"{num_rows:,} rows x {shape.vocab_size:,} x 4 B + {sampling / MIB:.1f} MiB for sampling"
        + (f" + {num_scored:,} hidden states {hidden / MIB:.1f} MiB" if num_scored else ""),
    )


def lane_entries(
    shape: ModelShape,
    micro_batches: Sequence[MicroBatch],
    prefill_chunk_tokens: int,
    *,
    slack_bytes: int = ALLOCATOR_SLACK_BYTES,
) -> tuple[Entry, ...]:
    """Returns the compute memory of concurrent lanes, without KV cache: states, hidden states, activations, logits."""
    size, width = shape.compute_dtype_bytes, shape.hidden_size  # bytes per element, elements per hidden vector
    tokens = [pass_tokens(shape, lane, prefill_chunk_tokens) for lane in micro_batches]  # per pass, by lane
    largest, in_flight, num_rows = max(tokens, default=0), sum(tokens), sum(map(len, micro_batches))
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim  # elements of queries, keys, values per token
    # Activations of the largest lane, in elements: four hidden vectors per token, and the step that takes most memory.
    # This is attention, with copies of queries, keys and values, or feed-forward.
    inner_vectors = 2 * min(largest, GATED_ROWS) if shape.has_fused_gates else INNER_VECTORS * largest
    widest_step = max(3 * largest * heads, inner_vectors * shape.intermediate_size)
    activations = 4 * largest * width + widest_step
    # Elements per token that every lane keeps between stages: hidden states, embeddings until the pass ends, RoPE.
    per_token = 2 * width + 2 * shape.head_dim
    attention = _attention_bytes(shape, micro_batches, prefill_chunk_tokens)
    widest = max(width, heads, shape.intermediate_size)
    packed = min(PACKED_INPUT_BYTES, 6 * largest * widest) + KERNEL_SCRATCH_BYTES
    # Products with few rows convert a panel of weights; those with many rows also pack their inputs.
    products = max(PANEL_BYTES, packed + min(PANEL_BYTES, 4 * width * widest))
    num_choices = max((stage.num_experts_per_token for stage in shape.stages), default=0)
    if shape.has_decode_kernel and num_choices:  # groups of experts on a CPU
        visits = in_flight * num_choices * visit_elements(width, shape.expert_inner_size)
        products += min(GROUPED_BYTES, visits * size)
    entries = list[Entry]()
    if per_row := shape.state_bytes_per_sequence:
        equation = f"{num_rows:,} sequences x {per_row:,} B"
        entries.append(Entry(name="states", num_bytes=num_rows * per_row, equation=equation))
    if per_row := shape.kv_tail_bytes_per_sequence:
        # Sequences and shared prefixes have a tail each, a partly filled page. Counts at least one prefix per lane, as
        # a prefix may be added while the lane runs.
        shares = map(prefix_shares, micro_batches)
        num_tails = num_rows + sum(max(1, len(share.parents)) if share is not None else 1 for share in shares)
        equation = f"{num_tails:,} sequences x {per_row:,} B of {PAGE_TOKENS} unquantized positions"
        entries.append(Entry(name="KV tails", num_bytes=num_tails * per_row, equation=equation))
    if shape.has_encoder:
        entries += _encoder_entries(shape, micro_batches)
    if shape.delta_rule is not None:
        entries.append(_delta_rule_entry(shape, shape.delta_rule, micro_batches, prefill_chunk_tokens))
    if shape.num_parts > 1:
        entries.append(_gather_entry(shape, largest, micro_batches))
    equation = f"{in_flight:,} tokens in flight x {per_token:,} x {size} B"
    entries.append(Entry(name="hidden states", num_bytes=in_flight * per_token * size, equation=equation))
    if shape.rank_stages is not None:  # received from the previous rank and sent to the next
        equation = f"2 x {in_flight:,} tokens in flight x {width:,} x {size} B"
        entries.append(Entry(name="rank transfers", num_bytes=2 * in_flight * width * size, equation=equation))
    equation = f"{largest:,} tokens of the largest lane: {activations:,} x {size} B + attention {attention:,} B"
    entries.append(Entry(name="activations", num_bytes=activations * size + attention, equation=equation))
    if shape.tables:
        entries.append(_tables_entry(shape, largest))
    if shape.draft is not None:
        entries.append(_draft_entry(shape.draft, micro_batches, prefill_chunk_tokens))
    entries.append(_logits_entry(shape, micro_batches, tokens))
    equation = f"matrix products {products / MIB:.1f} MiB + slack {slack_bytes // MIB} MiB"
    entries.append(Entry(name="workspace", num_bytes=products + slack_bytes, equation=equation))
    return tuple(entries)


def _tables_entry(shape: ModelShape, num_tokens: int) -> Entry:
    """Returns the memory for rows of embedding tables: disk blocks, and the rows of a lookup as stored and computed."""
    blocks = rows = 0
    for table in shape.tables:
        num_rows = min(math.ceil(num_tokens * table.rows_per_token), table.shape[0])
        blocks = max(blocks, min(GATHERED_BLOCK_BYTES, num_rows * gathered_bytes(table.row_bytes)))
        rows = max(rows, num_rows * (table.row_bytes + 4 * table.shape[1]))
    equation = f"{num_tokens:,} tokens: blocks {blocks / MIB:.1f} MiB + rows {rows / MIB:.1f} MiB"
    return Entry(name="table rows", num_bytes=blocks + rows, equation=equation)


def _draft_entry(draft: ModelShape, micro_batches: Sequence[MicroBatch], chunk_tokens: int) -> Entry:
    """Returns the memory of the small model that guesses tokens: weights, keys and values, and a pass of one lane."""
    num_pages = kv_tokens(draft, micro_batches) // PAGE_TOKENS + sum(map(len, micro_batches))
    kv = num_pages * PAGE_TOKENS * draft.kv_bytes_per_token
    largest = max(micro_batches, key=len, default=())
    lane = sum(entry.num_bytes for entry in lane_entries(draft, [largest], chunk_tokens, slack_bytes=0))
    equation = f"weights {draft.weight_bytes / MIB:.1f} MiB + {num_pages:,} KV pages {kv / MIB:.1f} MiB "
    equation += f"+ a pass {lane / MIB:.1f} MiB"
    if draft.is_mtp_head:
        num_tokens = max(chunk_tokens, len(largest) * (1 + MAX_DRAFT_TOKENS))
        states = HEAD_STATES * num_tokens * draft.hidden_size * draft.compute_dtype_bytes
        lane, equation = lane + states, f"{equation} + hidden states {states / MIB:.1f} MiB"
    return Entry(name="draft model", num_bytes=draft.weight_bytes + kv + lane, equation=equation)


def gathered_bytes(row_bytes: int) -> int:
    """Returns the bytes of the disk blocks that a row may touch."""
    return round_up(row_bytes - 1, ALIGNMENT_BYTES) + ALIGNMENT_BYTES


def _gather_entry(shape: ModelShape, num_tokens: int, micro_batches: Sequence[MicroBatch]) -> Entry:
    """Returns the buffers of a tensor-parallel rank for exchanges with other ranks.

    They have the outputs of all ranks twice (received, and concatenated), or the exchange of whole experts.
    """
    size, heads = shape.compute_dtype_bytes, shape.num_parts * shape.num_heads * shape.head_dim
    gated_tokens = min(num_tokens, GATED_ROWS) if shape.has_fused_gates else num_tokens
    max_rows = max(map(len, micro_batches), default=0)
    largest_output = max(
        num_tokens * max(heads, shape.hidden_size), gated_tokens * shape.intermediate_size, max_rows * shape.vocab_size
    )
    num_elements = max(2 * largest_output, num_tokens * exchanged_elements(shape))
    return Entry(name="gather buffers", num_bytes=num_elements * size, equation=f"{num_elements:,} x {size} B")


def visit_elements(hidden_size: int, inner_size: int) -> int:
    """Returns the elements of one visit: an expert computed for one token.

    Counts vectors of hidden size (the input, and the output unweighted, weighted and in float32) and vectors of
    intermediate size (gate, up, and twice their product).
    """
    return 6 * hidden_size + 4 * inner_size


def exchanged_elements(shape: ModelShape) -> int:
    """Returns the elements per token in the exchange between ranks with whole experts; 0 without whole experts.

    In the worst case this rank has all experts that tokens visit. It sends their outputs, receives outputs for the
    tokens that it sums, and sends and receives sums.
    """
    if not shape.num_whole_experts:
        return 0
    choices = max(stage.num_experts_per_token for stage in shape.layers)
    return (min(choices, shape.num_whole_experts) + -(-choices // shape.num_parts) + 2) * shape.hidden_size


def _delta_rule_entry(
    shape: ModelShape, rule: DeltaRule, micro_batches: Sequence[MicroBatch], chunk_tokens: int
) -> Entry:
    """Returns the memory of gated delta net layers, for the lane that needs most."""
    size, lanes = shape.compute_dtype_bytes, list(filter(None, micro_batches))
    rectangles = [(len(lane), prompt_columns(shape, len(lane), _prompt_width(lane), chunk_tokens)) for lane in lanes]
    rows, columns = max(rectangles, key=lambda rectangle: rule.num_bytes(*rectangle, size), default=(0, 0))
    return Entry(
        name="delta rule",
        num_bytes=rule.num_bytes(rows, columns, size),
        equation=f"{rows:,} rows of {columns:,} columns in chunks of {CHUNK_COLUMNS}, {rule.num_heads} heads of "
        f"{rule.key_dim} x {rule.value_dim} in float32",
    )


def _encoder_entries(shape: ModelShape, micro_batches: Sequence[MicroBatch]) -> tuple[Entry, ...]:
    """Returns the memory for the encoder's output, and for the position bias and mask of all pairs of positions."""
    size = shape.compute_dtype_bytes
    rectangles = [(len(lane), _prompt_width(lane)) for lane in micro_batches if lane]
    positions = sum(rows * width for rows, width in rectangles)
    per_position = shape.cross_kv_bytes_per_token + shape.hidden_size * size
    pair_bytes = sum((shape.num_heads * size + rows) * width**2 for rows, width in rectangles)
    return (
        Entry(
            name="encoder output",
            num_bytes=positions * per_position,
            equation=f"{positions:,} positions x ({shape.cross_kv_bytes_per_token:,} B of keys and values + "
            f"{shape.hidden_size:,} x {size} B)",
        ),
        Entry(
            name="position bias",
            num_bytes=pair_bytes,
            equation=f"({shape.num_heads} heads x {size} B + mask) x pairs of positions of each lane",
        ),
    )


def _attention_bytes(shape: ModelShape, micro_batches: Sequence[MicroBatch], chunk_tokens: int) -> int:
    """Returns the attention memory of the lane that needs most.

    It has the scores of a decode step, or the masks, scores and gathered KV of a prefill chunk. Expanded latents (MLA)
    are added to either.
    """
    size = shape.compute_dtype_bytes
    largest = 0
    for lane in filter(None, micro_batches):
        longest = max(_row_positions(shape, lane), _prompt_width(lane) if shape.has_encoder else 0)
        tokens = pass_tokens(shape, lane, chunk_tokens)
        rows = len(lane) if shape.is_packed else tokens
        decode = 0 if shape.has_decode_kernel else 2 * rows * shape.num_heads * longest * size  # scores, twice
        prefill = 0
        if shape.is_packed and shape.attention_method is not AttentionMethod.host:
            sizes = AttentionSizes(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                item_bytes=size,
                num_rows=len(lane),
                num_tokens=tokens,
                num_positions=sum(row.capacity_tokens for row in lane),
                longest=longest,
            )
            prefill = device_attention_bytes(shape.attention_method, sizes)
            decode = decode if shape.expanded_kv_width else 0  # counted above, except with latents
        elif shape.is_packed:  # on a CPU, prompt by prompt: mask and scores, and gathered keys and values
            prefill = min(chunk_tokens, longest) * longest * (2 + size * (1 + 3 * shape.score_heads))
            prefill += 2 * longest * shape.num_kv_heads * shape.head_dim * size
        if shape.kv_dtype.is_quantized:
            # Three float32 copies of the keys and values of a prompt, or of the rows that an accelerator gathers.
            # Masks cover new positions twice, as the pass attends to them both in quantized pages and unquantized.
            width, new = shape.num_kv_heads * shape.head_dim, min(tokens, longest)
            max_positions = GATHERED_BYTES // (2 * width * size)
            positions = longest if shape.has_decode_kernel else max(longest, min(len(lane) * longest, max_positions))
            prefill += 3 * 2 * width * 4 * positions + 4 * new * (longest + new)
        expanded = 2 * len(lane) * longest * shape.expanded_kv_width * size  # latents of all rows
        largest = max(largest, decode + expanded, prefill + expanded)
    return largest


def resumed_chunks(
    shape: ModelShape, planned: Sequence[MicroBatch], resumed: Sequence[MicroBatch], chunk_tokens: int, spare_bytes: int
) -> tuple[int, ...]:
    """Returns the maximum prefill tokens per pass, by lane, for a run that resumes.

    `planned`: the lanes for which memory is planned. `resumed`: lanes with the remaining sequences, whose generated
    tokens now belong to their prompts. `spare_bytes`: compute memory that the ledger leaves unused.
    """
    if shape.has_encoder:
        # An encoder-decoder computes logits for every token: as many as fit into the encoder's freed activations.
        max_logits = [
            len(lane) + (encoder_activation_bytes(shape, lane) + spare_bytes) // (4 * shape.vocab_size)
            for lane in planned
        ]
        pairs = zip(planned, max_logits, strict=True)
        return tuple(max(len(lane), min(pass_tokens(shape, lane, 0), most)) for lane, most in pairs)
    planned_tokens = [pass_tokens(shape, lane, chunk_tokens) for lane in planned]
    available_bytes = _num_bytes(lane_entries(shape, planned, chunk_tokens)) + spare_bytes
    tokens = chunk_tokens
    while tokens > max(planned_tokens, default=0):
        if _num_bytes(lane_entries(shape, resumed, tokens)) <= available_bytes:
            return (tokens,) * len(planned)
        tokens //= 2
    return tuple(planned_tokens)


def draft_bytes(
    shape: ModelShape, lanes: Sequence[MicroBatch], chunk_tokens: int, num_drafted: int, *, beside_prompts: bool = False
) -> int:
    """Returns the compute memory that `num_drafted` drafted tokens per sequence take beyond that of a prefill pass.

    In memory, each drafted token of a decode pass is like one more sequence. `beside_prompts`: passes prefill and
    decode, so logits of drafted tokens need memory beside that of a prefill pass.
    """
    per_sequence = {"states", "KV tails", "draft model"}

    def num_bytes(lanes: Sequence[MicroBatch], tokens: int) -> int:
        return _num_bytes([entry for entry in lane_entries(shape, lanes, tokens) if entry.name not in per_sequence])

    def logits_bytes(lanes: Sequence[MicroBatch]) -> int:
        return _logits_entry(shape, lanes, [0] * len(lanes)).num_bytes

    drafted = [[*lane] * (1 + num_drafted) for lane in lanes]
    beside = logits_bytes(drafted) - logits_bytes(lanes) if beside_prompts else 0
    return max(0, beside, num_bytes(drafted, 1) - num_bytes(lanes, chunk_tokens))


def encoder_activation_bytes(shape: ModelShape, lane: MicroBatch) -> int:
    """Returns a lower bound of the encoder's activations, which are freed before the decoder's head runs."""
    num_elements = (4 * shape.hidden_size + 3 * shape.intermediate_size) * pass_tokens(shape, lane, 0)
    return num_elements * shape.compute_dtype_bytes


def _num_bytes(entries: Sequence[Entry]) -> int:
    return sum(entry.num_bytes for entry in entries)


NUM_RECORDINGS = 16  # CUDA graphs kept; older ones are dropped
RECORDING_BYTES = 32 * MIB  # estimate of the driver's memory for the launches of a pass
RECORDING_HEADROOM = 1.5  # maximum ratio of the positions for which a graph is recorded to those in use
# Entries of `lane_entries` that a recorded pass needs in the graphs' pool.
PASS_ENTRIES = frozenset({"hidden states", "activations", "logits"})


def recordings_entry(shape: ModelShape, lanes: Sequence[MicroBatch]) -> Entry:
    """Returns the memory of the CUDA graphs of decode passes. They share one memory pool for a pass."""
    entries = lane_entries(shape, lanes, prefill_chunk_tokens=1, slack_bytes=0)
    pass_bytes = round(RECORDING_HEADROOM * sum(entry.num_bytes for entry in entries if entry.name in PASS_ENTRIES))
    return Entry(
        name="CUDA graphs",
        num_bytes=pass_bytes + NUM_RECORDINGS * RECORDING_BYTES,
        equation=f"a decode pass {pass_bytes:,} B + {NUM_RECORDINGS} x {RECORDING_BYTES // MIB} MiB",
    )
