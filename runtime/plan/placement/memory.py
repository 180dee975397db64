"""The terms of the ledger: how many bytes a placement and a block of sequences take in each memory.

Every term is an upper bound from shapes alone. Activations are those of one lane passing one stage; between stages a
lane keeps only its hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...batching.prefixes import PrefixSharing, SharedPrefix
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
from ..shape.model import ModelShape
from .ledger import Entry

PANEL_BYTES = 16 * MIB  # of widened weights, at most
DEQUANTIZED_AT_ONCE = 1 << 24  # numbers that a device dequantizes together, see linear/stored.py
# Rows of all lanes up to which a device, where it has a kernel, multiplies 16-bit numbers with codes as they lie. Of an
# H100 more are faster with numbers that all lanes share: as much is decoded for 8 lanes of 16 rows as for one of 128.
FEW_ROWS = 128
DEQUANTIZING_BYTES = 4 * 4 * DEQUANTIZED_AT_ONCE  # of float32, and of what operators make on the way there
LANE_INNER = 3  # vectors of a token in its feed-forward: gate, up and their product
GATED_ROWS = 512  # tokens that pass a feed-forward at a time, where it is ours, see model/fused.py
GROUPED_BYTES = 16 * MIB  # of what experts are given at once and make, on a CPU, see model/expert_groups.py
LAID_OUT_BYTES, KERNEL_SCRATCH_BYTES = 24 * MIB, 8 * MIB  # inputs as kernels have them, and what their threads need
# What choosing tokens makes of the few logits that it takes at a time, see sequences/sampler.py.
SAMPLING_BYTES = 24 * MIB
SEARCH_FACTOR = 6  # times the logits of beams that are looked at together: their scores, and copies of them
HEAD_SLICE_BYTES = 64 * MIB  # of float32 logits that are made at a time where many tokens are scored
ALLOCATOR_SLACK_BYTES = 48 * MIB  # measured: heap fragmentation, libraries' buffers (docs/explanation/memory.md)


@dataclass(frozen=True, kw_only=True)
class SequenceSize:
    """The size of one request: `num_prompt_tokens` to prefill and at most `max_new_tokens` to generate. Where the last
    `num_scored` tokens of the prompt are scored, the one new token is none that is generated: it is given. `prefix`:
    what of the prompt others of the run have as well, and may share. `num_beams` neighbours of the run are the beams of
    one search, each a sequence of its own."""

    num_prompt_tokens: int
    max_new_tokens: int
    num_scored: int = 0
    prefix: SharedPrefix | None = None
    num_beams: int = 1

    @cached_property
    def capacity_tokens(self) -> int:
        """KV positions reserved for the sequence."""
        num_new = 0 if self.num_scored else self.max_new_tokens
        return round_up(self.num_prompt_tokens + num_new, PAGE_TOKENS)

    def num_selected(self, past: int, new: int) -> int:
        """How many of the `new` tokens of its prompt behind `past` others want logits, which are the last of them."""
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
        """One object for all requests of this size: a run may have 100,000 of a few hundred sizes."""
        return SequenceSize(
            num_prompt_tokens=num_prompt_tokens,
            max_new_tokens=max_new_tokens,
            num_scored=num_scored,
            prefix=prefix,
            num_beams=num_beams,
        )

    def with_prefix(self, prefix: SharedPrefix | None) -> "SequenceSize":
        """The same, of a prompt that begins with `prefix`."""
        if prefix is self.prefix:
            return self
        return SequenceSize.interned(
            self.num_prompt_tokens, self.max_new_tokens, self.num_scored, prefix, self.num_beams
        )


MicroBatch = Sequence[SequenceSize]


def kv_tokens(shape: ModelShape, micro_batches: Sequence[MicroBatch], *, among_lanes: bool = False) -> int:
    """KV positions of a block, when every sequence has run to its limit. A padded lane holds a rectangle as wide as its
    longest prompt and longest answer; of an encoder-decoder's, the decoder's own positions are those of the answer.
    Those that sequences of a lane share, or with `among_lanes` of the block, are counted once: pages that are whole,
    and one that is not."""
    if shape.is_packed:
        sharing = [[size for lane in micro_batches for size in lane]] if among_lanes else micro_batches
        return sum(size.capacity_tokens for lane in micro_batches for size in lane) - sum(
            map(_spared_positions, sharing)
        )
    return sum(len(lane) * _row_positions(shape, lane) for lane in micro_batches if lane)


def _spared_positions(lane: MicroBatch) -> int:
    """KV positions that the lane does not hold because they are shared."""
    shares = prefix_shares(lane)
    if shares is None:
        return 0
    members = sum(_whole_page_tokens(prefix.num_tokens) for prefix in shares.prefixes if prefix is not None)
    shared = (
        round_up(prefix.num_tokens, PAGE_TOKENS) - (_whole_page_tokens(parent.num_tokens) if parent is not None else 0)
        for prefix, parent in shares.parents.items()
    )
    return members - sum(shared)


def _whole_page_tokens(num_tokens: int) -> int:
    return num_tokens // PAGE_TOKENS * PAGE_TOKENS


def prefix_shares(lane: MicroBatch) -> PrefixSharing | None:
    """What the sequences of a lane share; None where that is nothing."""
    if all(size.prefix is None for size in lane):
        return None
    shares = PrefixSharing.from_prefixes([size.prefix for size in lane])
    return shares if shares.parents else None


def computed_tokens(lane: MicroBatch) -> int:
    """Tokens of prompts that the lane computes, those that are shared once."""
    shares, num_tokens = prefix_shares(lane), sum(size.num_prompt_tokens for size in lane)
    if shares is None:
        return num_tokens
    return num_tokens - shares.num_spared()


def _row_positions(shape: ModelShape, lane: MicroBatch) -> int:
    """KV positions of a lane's longest row."""
    if shape.is_packed:
        return max(size.capacity_tokens for size in lane)
    if shape.has_encoder:
        return round_up(max(max(size.max_new_tokens, size.num_scored) for size in lane), PAGE_TOKENS)
    return round_up(_prompt_width(lane) + max(size.max_new_tokens for size in lane), PAGE_TOKENS)


def _may_restart(shape: ModelShape, size: SequenceSize) -> bool:
    """Whether it may come to where all of its keys are computed once more."""
    limit = shape.restart_tokens
    return limit is not None and size.num_prompt_tokens < limit < size.num_prompt_tokens + size.max_new_tokens


def _prompt_width(lane: MicroBatch) -> int:
    return max((size.num_prompt_tokens for size in lane), default=0)


def chunk_columns(num_rows: int, width: int, chunk_tokens: int) -> int:
    """Columns of a padded rectangle that one pass prefills, of the last chunk perhaps fewer. None has a single one,
    unless the prompt has: recurrent layers take that for a decode step, which has no padding."""
    max_columns = min(width, max(2, chunk_tokens // num_rows))
    fitting = (
        columns for columns in (*range(max_columns, 1, -1), *range(max_columns + 1, width)) if width % columns != 1
    )
    return next(fitting, width)


def prompt_columns(shape: ModelShape, num_rows: int, width: int, chunk_tokens: int) -> int:
    """`chunk_columns`, or all of them where a class takes no chunks."""
    return width if shape.has_whole_prompts else chunk_columns(num_rows, width, chunk_tokens)


def pass_tokens(shape: ModelShape, lane: MicroBatch, prefill_chunk_tokens: int) -> int:
    """Most tokens that a lane carries in one pass; it may be fewer where its prompts share what they begin with, and
    all of them together then are less than a chunk."""
    if not lane:
        return 0
    if shape.is_packed:
        # One that may restart wants all of its keys computed at a time.
        row_tokens = (
            shape.restart_tokens or 0 if _may_restart(shape, size) else size.num_prompt_tokens for size in lane
        )
        return max(len(lane), min(prefill_chunk_tokens, sum(row_tokens)))
    width = _row_positions(shape, lane) if any(_may_restart(shape, size) for size in lane) else _prompt_width(lane)
    if shape.has_encoder:  # each position looks at all others, so a prompt cannot be cut
        return len(lane) * (width + max(size.num_scored for size in lane))
    return len(lane) * prompt_columns(shape, len(lane), width, prefill_chunk_tokens)


def prefill_passes(shape: ModelShape, lane: MicroBatch, prefill_chunk_tokens: int) -> int:
    """Passes that a lane's prompts take."""
    tokens = computed_tokens(lane) if shape.is_packed else len(lane) * _prompt_width(lane)
    return -(-tokens // pass_tokens(shape, lane, prefill_chunk_tokens)) if tokens else 0


def head_rows(vocab_size: int) -> int:
    """Scored tokens whose logits are made at a time."""
    return max(1, HEAD_SLICE_BYTES // (4 * vocab_size))


def _logits_entry(shape: ModelShape, micro_batches: Sequence[MicroBatch], tokens: Sequence[int]) -> Entry:
    """The logits of a lane, a row of them for each sequence; of scored tokens a slice, and the hidden states that the
    other slices are made of. `tokens`: of each lane, the most that it carries in a pass."""
    num_rows = max((len(lane) for lane in micro_batches), default=0)
    pairs = zip(micro_batches, tokens, strict=True)
    num_scored = max((min(most, sum(size.num_scored for size in lane)) for lane, most in pairs), default=0)
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
        equation=f"{num_rows:,} rows x {shape.vocab_size:,} x 4 B + {sampling / MIB:.1f} MiB to draw from them"
        + (f" + {num_scored:,} hidden states {hidden / MIB:.1f} MiB" if num_scored else ""),
    )


def lane_entries(
    shape: ModelShape,
    micro_batches: Sequence[MicroBatch],
    prefill_chunk_tokens: int,
    *,
    slack_bytes: int = ALLOCATOR_SLACK_BYTES,
) -> tuple[Entry, ...]:
    """States, hidden states, activations and logits of lanes side by side, in the compute device's memory."""
    size, width = shape.compute_dtype_bytes, shape.hidden_size
    tokens = [pass_tokens(shape, lane, prefill_chunk_tokens) for lane in micro_batches]
    largest, in_flight, num_rows = max(tokens, default=0), sum(tokens), sum(map(len, micro_batches))
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    inner = (2 * min(largest, GATED_ROWS) if shape.has_fused_gates else LANE_INNER * largest) * shape.intermediate_size
    widest_step = max(3 * largest * heads, inner)  # queries, keys and values twice
    numbers = 4 * largest * width + widest_step
    between = 2 * width + 2 * shape.head_dim  # models keep what they embedded until the pass ends
    attention = _attention_bytes(shape, micro_batches, prefill_chunk_tokens)
    widest = max(width, heads, shape.intermediate_size)
    laid_out = min(LAID_OUT_BYTES, 6 * largest * widest) + KERNEL_SCRATCH_BYTES
    products = max(PANEL_BYTES, laid_out + min(PANEL_BYTES, 4 * width * widest))  # few rows, then many
    choices = max((stage.num_experts_per_token for stage in shape.stages), default=0)
    if shape.has_decode_kernel and choices:  # experts that are multiplied at once on a CPU
        visits = in_flight * choices * visit_elements(width, shape.expert_inner_size)
        products += min(GROUPED_BYTES, visits * size)
    entries = list[Entry]()
    if per_row := shape.state_bytes_per_sequence:
        equation = f"{num_rows:,} sequences x {per_row:,} B"
        entries.append(Entry(name="states", num_bytes=num_rows * per_row, equation=equation))
    if per_row := shape.kv_tail_bytes_per_sequence:
        # What each sequence has not filled a page with yet, and each that computes for others: one at least of a lane,
        # as these may come while it goes on.
        shares = map(prefix_shares, micro_batches)
        num_tails = num_rows + sum(max(1, len(each.parents)) if each is not None else 1 for each in shares)
        equation = f"{num_tails:,} sequences x {per_row:,} B of {PAGE_TOKENS} positions as they are computed"
        entries.append(Entry(name="KV tails", num_bytes=num_tails * per_row, equation=equation))
    if shape.has_encoder:
        entries += _encoder_entries(shape, micro_batches)
    if shape.delta_rule is not None:
        entries.append(_delta_rule_entry(shape, shape.delta_rule, micro_batches, prefill_chunk_tokens))
    if shape.num_parts > 1:
        entries.append(_parts_entry(shape, largest, micro_batches))
    equation = f"{in_flight:,} tokens in flight x {between:,} x {size} B"
    entries.append(Entry(name="hidden states", num_bytes=in_flight * between * size, equation=equation))
    if shape.own is not None:  # what comes from the rank before and goes to the one behind, of all lanes of a pass
        equation = f"2 x {in_flight:,} tokens in flight x {width:,} x {size} B"
        entries.append(Entry(name="handed over", num_bytes=2 * in_flight * width * size, equation=equation))
    equation = f"{largest:,} tokens of the largest lane, {numbers:,} x {size} B + attention {attention:,} B"
    entries.append(Entry(name="activations", num_bytes=numbers * size + attention, equation=equation))
    entries.append(_logits_entry(shape, micro_batches, tokens))
    equation = f"products {products / MIB:.1f} MiB + slack {slack_bytes // MIB} MiB"
    entries.append(Entry(name="workspace", num_bytes=products + slack_bytes, equation=equation))
    return tuple(entries)


def _parts_entry(shape: ModelShape, num_tokens: int, micro_batches: Sequence[MicroBatch]) -> Entry:
    """What ranks that compute each token together make whole, as it comes and side by side; or what whole experts hand
    to one another."""
    size, inner = shape.compute_dtype_bytes, min(num_tokens, GATED_ROWS) if shape.has_fused_gates else num_tokens
    heads = shape.num_parts * shape.num_heads * shape.head_dim
    numbers = max(num_tokens * max(heads, shape.hidden_size), inner * shape.intermediate_size)
    numbers = max(numbers, max(map(len, micro_batches), default=0) * shape.vocab_size)
    numbers = max(2 * numbers, num_tokens * exchanged_elements(shape))
    return Entry(name="parts made whole", num_bytes=numbers * size, equation=f"{numbers:,} x {size} B")


def visit_elements(hidden_size: int, inner_size: int) -> int:
    """What an expert makes of a token: the input, gate and up, their product twice, and the output, as its token has it
    and weighted, once in float32."""
    return 6 * hidden_size + 4 * inner_size


def exchanged_elements(shape: ModelShape) -> int:
    """What experts that ranks have whole make of a token, if all that it visits are this rank's, what comes from
    others of the tokens that this one adds up, and sums, as they are told and as they come."""
    if not shape.num_whole_experts:
        return 0
    choices = max(stage.num_experts_per_token for stage in shape.layers)
    return (min(choices, shape.num_whole_experts) + -(-choices // shape.num_parts) + 2) * shape.hidden_size


def _delta_rule_entry(
    shape: ModelShape, rule: DeltaRule, micro_batches: Sequence[MicroBatch], chunk_tokens: int
) -> Entry:
    """The entry of the lane that takes most: many short rows are padded to many columns."""
    size, lanes = shape.compute_dtype_bytes, list(filter(None, micro_batches))
    rectangles = [(len(lane), prompt_columns(shape, len(lane), _prompt_width(lane), chunk_tokens)) for lane in lanes]
    rows, columns = max(rectangles, key=lambda each: rule.num_bytes(*each, size), default=(0, 0))
    return Entry(
        name="delta rule",
        num_bytes=rule.num_bytes(rows, columns, size),
        equation=f"{rows:,} rows of {columns:,} columns in chunks of {CHUNK_COLUMNS}, {rule.num_heads} heads of "
        f"{rule.key_dim} x {rule.value_dim} in float32",
    )


def _encoder_entries(shape: ModelShape, micro_batches: Sequence[MicroBatch]) -> tuple[Entry, ...]:
    """What the encoder leaves behind, and what a lane carries from layer to layer beside its hidden states: a bias for
    each pair of positions, and the mask."""
    size = shape.compute_dtype_bytes
    rectangles = [(len(lane), _prompt_width(lane)) for lane in micro_batches if lane]
    positions = sum(rows * width for rows, width in rectangles)
    per_position = shape.cross_kv_bytes_per_token + shape.hidden_size * size
    pairs = sum((shape.num_heads * size + rows) * width**2 for rows, width in rectangles)
    return (
        Entry(
            name="encoder output",
            num_bytes=positions * per_position,
            equation=f"{positions:,} positions x ({shape.cross_kv_bytes_per_token:,} B of keys and values + "
            f"{shape.hidden_size:,} x {size} B)",
        ),
        Entry(
            name="position bias",
            num_bytes=pairs,
            equation=f"{shape.num_heads} heads x {size} B and a mask, of each lane's pairs of positions",
        ),
    )


def _attention_bytes(shape: ModelShape, micro_batches: Sequence[MicroBatch], chunk_tokens: int) -> int:
    """What attention takes in the lane that takes most. Where the host computes: scores of a decode step over a lane;
    of a prefill chunk the masks, the scores and what is gathered of its sequence's keys and values; and latents
    expanded to keys and values."""
    size = shape.compute_dtype_bytes
    worst = 0
    for lane in filter(None, micro_batches):
        longest = max(_row_positions(shape, lane), _prompt_width(lane) if shape.has_encoder else 0)
        tokens = pass_tokens(shape, lane, chunk_tokens)
        rows = len(lane) if shape.is_packed else tokens
        decode = 0 if shape.has_decode_kernel else 2 * rows * shape.num_heads * longest * size
        prefill = 0
        if shape.is_packed and shape.attention_method is not AttentionMethod.host:
            sizes = AttentionSizes(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                item_bytes=size,
                num_rows=len(lane),
                num_tokens=tokens,
                num_positions=sum(each.capacity_tokens for each in lane),
                longest=longest,
            )
            prefill = device_attention_bytes(shape.attention_method, sizes)
            decode = decode if shape.expanded_kv_width else 0
        elif shape.is_packed:
            prefill = min(chunk_tokens, longest) * longest * (2 + size * (1 + 3 * shape.score_heads))
            prefill += 2 * longest * shape.num_kv_heads * shape.head_dim * size
        if shape.kv_dtype.is_quantized:
            # What quantised pages take while they become numbers, three times in float32, of a prompt or of as many
            # rows as an accelerator gathers at a time; and masks over the pages of a pass, which are seen as kept and
            # as computed.
            width, new = shape.num_kv_heads * shape.head_dim, min(tokens, longest)
            most = GATHERED_BYTES // (2 * width * size)
            positions = longest if shape.has_decode_kernel else max(longest, min(len(lane) * longest, most))
            prefill += 3 * 2 * width * 4 * positions + 4 * new * (longest + new)
        expanded = 2 * len(lane) * longest * shape.expanded_kv_width * size
        worst = max(worst, decode + expanded, prefill + expanded)
    return worst


def resumed_chunks(
    shape: ModelShape, planned: Sequence[MicroBatch], resumed: Sequence[MicroBatch], chunk_tokens: int, spare_bytes: int
) -> tuple[int, ...]:
    """Tokens that each lane may carry in a prefill pass. `planned`: the lanes as they were before anything was
    generated; `resumed`: what is left of them, with all that is known as prompts; `spare_bytes`: what the compute
    device's ledger leaves over."""
    if shape.has_encoder:
        # The head of a decoder behind an encoder makes logits of every token that it is given: as many as find room
        # where the encoder's activations were, and no more than those had tokens.
        room = [
            len(lane) + (encoder_activation_bytes(shape, lane) + spare_bytes) // (4 * shape.vocab_size)
            for lane in planned
        ]
        pairs = zip(planned, room, strict=True)
        return tuple(max(len(lane), min(pass_tokens(shape, lane, 0), most)) for lane, most in pairs)
    as_planned = [pass_tokens(shape, lane, chunk_tokens) for lane in planned]
    room, tokens = _num_bytes(lane_entries(shape, planned, chunk_tokens)) + spare_bytes, chunk_tokens
    while tokens > max(as_planned, default=0):
        if _num_bytes(lane_entries(shape, resumed, tokens)) <= room:
            return (tokens,) * len(planned)
        tokens //= 2
    return tuple(as_planned)


def encoder_activation_bytes(shape: ModelShape, lane: MicroBatch) -> int:
    """Bytes of its activations, at least, which are gone when the decoder's head runs."""
    numbers = (4 * shape.hidden_size + 3 * shape.intermediate_size) * pass_tokens(shape, lane, 0)
    return numbers * shape.compute_dtype_bytes


def _num_bytes(entries: Sequence[Entry]) -> int:
    return sum(entry.num_bytes for entry in entries)


NUM_RECORDINGS = 16  # that are kept: the latest
RECORDING_BYTES = 32 * MIB  # of the driver, for the launches of a pass: an estimate
RECORDING_HEADROOM = 1.5  # times the positions that a pass looks at, at most
PASS_ENTRIES = frozenset({"hidden states", "activations", "logits"})


def recordings_entry(shape: ModelShape, lanes: Sequence[MicroBatch]) -> Entry:
    """All compute in the same memory, which nothing else uses; what they start from and give lies beside it."""
    entries = lane_entries(shape, lanes, prefill_chunk_tokens=1, slack_bytes=0)
    pass_bytes = round(RECORDING_HEADROOM * sum(entry.num_bytes for entry in entries if entry.name in PASS_ENTRIES))
    return Entry(
        name="recordings",
        num_bytes=pass_bytes + NUM_RECORDINGS * RECORDING_BYTES,
        equation=f"a decode pass {pass_bytes:,} B + {NUM_RECORDINGS} x {RECORDING_BYTES // MIB} MiB",
    )
