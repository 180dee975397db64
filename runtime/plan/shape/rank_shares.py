"""One rank's share of a model: rows of each matrix or whole experts (tensor parallelism), or layers (pipeline)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ...config.settings import DividedExperts
from ...errors import require
from .model import ModelShape
from .shapes import Companion, Parameter, Stage, StageKind, TensorSlice, inner_size


@dataclass(frozen=True, kw_only=True)
class RowShare:
    """One of `count` equal row ranges."""

    index: int
    count: int

    def divides(self, num_rows: int) -> bool:
        return num_rows % self.count == 0

    def rows(self, num_rows: int) -> range:
        """Returns this share's rows of `num_rows`."""
        height = num_rows // self.count
        return range(self.index * height, (self.index + 1) * height)


def cut_rows(parameter: Parameter, share: RowShare, *, num_fused: int = 1) -> Parameter | None:
    """Returns the parameter with one share of its rows; a stack is cut matrix by matrix.

    `num_fused`: number of fused matrices (2 for gate and up); each is cut separately, and the parts are concatenated.
    Returns None if rows are not contiguous in the file, or a cut would split a block that shares one scale.
    """
    is_stack = parameter.is_stacked or len(parameter.shape) == 3
    entries = parameter.pieces
    if is_stack and not parameter.is_stacked:
        [[whole]] = entries
        entries = tuple((whole.expert(index),) for index in range(whole.shape[0]))
    height = sum(piece.shape[0] for piece in entries[0])
    if parameter.is_transposed or not share.divides(height // num_fused) or height % num_fused:
        return None
    fused_height = height // num_fused
    rows = share.rows(fused_height)
    row_ranges = [range(n * fused_height + rows.start, n * fused_height + rows.stop) for n in range(num_fused)]
    parts = [_cut_entry(entry, row_ranges) for entry in entries]
    pieces = tuple(part for part in parts if part is not None)
    if len(pieces) < len(parts):
        return None
    row_axis = 1 if is_stack else 0
    shape = (*parameter.shape[:row_axis], height // share.count, *parameter.shape[row_axis + 1 :])
    return replace(parameter, shape=shape, pieces=pieces, is_stacked=is_stack)


def _cut_entry(pieces: Sequence[TensorSlice], row_ranges: Sequence[range]) -> tuple[TensorSlice, ...] | None:
    """Returns these row ranges of a matrix concatenated from `pieces`; None if they cannot be separated."""
    slices = list[TensorSlice]()
    for rows in row_ranges:
        begin = 0
        for piece in pieces:
            first, last = max(rows.start, begin), min(rows.stop, begin + piece.shape[0])
            if first < last:
                part = slice_rows(piece, first - begin, last - begin)
                if part is None:
                    return None
                slices.append(part)
            begin += piece.shape[0]
    return tuple(slices)


def slice_rows(piece: TensorSlice, first: int, last: int) -> TensorSlice | None:
    """Returns rows [first, last) of a tensor; None if they are not contiguous bytes."""
    height, tail = piece.shape[0], piece.shape[1:]
    if piece.is_interleaved:
        return replace(piece, shape=(last - first, *tail), first_row=piece.first_row + first)
    row_bytes, rest = divmod(piece.num_bytes, height)
    rows = [row for run in piece.row_order for row in run][first:last]
    # Permuted rows can be cut only if the range maps to itself in the file.
    if rest or piece.is_transposed or (piece.row_order and sorted(rows) != list(range(first, last))):
        return None
    companions = list[Companion]()
    for companion in piece.companions:
        if not companion.is_shared:
            block = companion.block_rows
            if first % block or (last % block and last != height):
                return None
            part = slice_rows(companion.tensor, first // block, -(-last // block))
            if part is None:
                return None
            companion = replace(companion, tensor=part)
        companions.append(companion)
    return replace(
        piece,
        name=f"{piece.name}[{first}:{last}]",
        offset=piece.offset + first * row_bytes,
        num_bytes=(last - first) * row_bytes,
        shape=(last - first, *tail),
        companions=tuple(companions),
        row_order=tuple(range(row - first, row - first + 1) for row in rows),
        first_row=piece.first_row + first,
    )


def split_evenly(count: int, num_parts: int) -> Sequence[range]:
    """Splits range(count) into `num_parts` contiguous ranges; the first ones may be longer by one."""
    base, remainder = divmod(count, num_parts)
    begins = [part * base + min(part, remainder) for part in range(num_parts + 1)]
    return [range(begin, end) for begin, end in pairwise(begins)]


def whole_experts_send_less(hidden_size: int, inner_size: int, num_ranks: int) -> bool:
    """True if ranks exchange less with whole experts than with rows of every expert.

    Per visit, a whole expert sends its output to the rank that sums the token; rows of an expert send intermediate
    activations to all ranks. In both cases the sum goes to all ranks.
    """
    return hidden_size <= inner_size * num_ranks


def keeps_experts_whole(stage: Stage, hidden_size: int, num_ranks: int, mode: DividedExperts) -> bool:
    """True if ranks hold whole experts of a stage."""
    inner = inner_size(stage, hidden_size)
    if not inner or mode is DividedExperts.rows or stage.num_experts < num_ranks:
        return False
    stacks = [stack for stack in stage.stacks if stack.is_experts]
    # Reading some rows of an interleaved stack would read all its bytes.
    is_interleaved = any(piece.is_interleaved for stack in stacks for piece in stack.slices)
    return mode is DividedExperts.whole or is_interleaved or whole_experts_send_less(hidden_size, inner, num_ranks)


def slice_experts(stack: Parameter, experts: range) -> Parameter | None:
    """Returns the stack with these experts only; None if experts are not contiguous in the file."""
    if len(stack.shape) != 3:
        return None
    entries, num_experts = stack.pieces, stack.shape[0]
    shape = (len(experts), *stack.shape[1:])
    if not stack.is_stacked:
        if len(entries) != 1 or len(entries[0]) != 1 or entries[0][0].shape[:1] != (num_experts,):
            return None
        [[whole]] = entries
        if not (whole.format or whole.companions or whole.is_transposed):
            matrix_bytes = whole.num_bytes // num_experts
            part = replace(  # neighboring matrices of an unquantized stack
                whole,
                name=f"{whole.name}[{experts.start}:{experts.stop}]",
                offset=whole.offset + experts.start * matrix_bytes,
                num_bytes=len(experts) * matrix_bytes,
                shape=(len(experts), *whole.shape[1:]),
            )
            return replace(stack, shape=shape, pieces=((part,),), num_experts=num_experts)
        entries = tuple((whole.expert(index),) for index in range(num_experts))
    pieces = tuple(entries[index] for index in experts)
    return replace(stack, shape=shape, pieces=pieces, is_stacked=True, num_experts=num_experts)


def tensor_parallel_shape(
    shape: ModelShape, num_ranks: int, experts: DividedExperts = DividedExperts.auto
) -> ModelShape:
    """Returns the shape of the first rank under tensor parallelism: matrices cut by output rows, KV heads divided.

    Each rank holds rows of every expert or whole experts, by `experts`. Ranks replicate hidden states, embeddings,
    head, vectors, routers, and matrices with rows not divisible by `num_ranks`. Raises ConfigError if KV heads are not.
    """
    heads, alternatives = shape.num_kv_heads, "devices=sharded or pipeline"
    is_equal = heads % num_ranks == 0 and shape.num_heads % num_ranks == 0
    reason = "caches latents shared by all heads" if shape.expanded_kv_width else "runs in padded lanes"
    require(
        shape.is_packed and not shape.expanded_kv_width,
        f"devices=tensor: model={shape.name} {reason}, so its heads cannot be divided: set {alternatives}",
    )
    require(
        is_equal,
        f"devices=tensor: model={shape.name} has {heads} KV heads, not divisible by plan.num_ranks={num_ranks}: "
        f"lower it, or set {alternatives}",
    )
    whole_stages = {s.index for s in shape.layers if keeps_experts_whole(s, shape.hidden_size, num_ranks, experts)}
    stages = list[Stage]()
    for stage in shape.stages:
        if not stage.kind.is_layer:
            stages.append(stage)
            continue
        first, is_whole = split_evenly(stage.num_experts, num_ranks)[0], stage.index in whole_stages
        parts = [slice_experts(p, first) if is_whole and p.is_experts else None for p in stage.parameters]
        pairs = zip(stage.parameters, parts, strict=True)
        parameters = tuple(part or _cut_parameter(p, stage.num_experts, num_ranks) for p, part in pairs)
        stages.append(replace(stage, parameters=parameters))
    return replace(
        shape,
        stages=tuple(stages),
        num_heads=shape.num_heads // num_ranks,
        num_kv_heads=heads // num_ranks,
        intermediate_size=shape.intermediate_size if whole_stages else -(-shape.intermediate_size // num_ranks),
        score_heads=-(-shape.score_heads // num_ranks),
        kv_layer_bytes=tuple(-(-size // num_ranks) for size in shape.kv_layer_bytes),
        kv_heads=tuple((-(-count // num_ranks), key, value) for count, key, value in shape.kv_heads),
        kv_tail_bytes_per_sequence=-(-shape.kv_tail_bytes_per_sequence // num_ranks),
    )


def pipeline_shape(shape: ModelShape, num_ranks: int) -> ModelShape:
    """Returns the shape of the largest pipeline rank, with all non-layer stages. Raises ConfigError if there are fewer
    layers than ranks."""
    layers = shape.layers
    require(
        len(layers) >= num_ranks,
        f"devices=pipeline: model={shape.name} has {len(layers)} layers for {num_ranks} ranks: lower plan.num_ranks",
    )
    count = -(-len(layers) // num_ranks)
    first = layers[0].index
    stages = [stage for stage in shape.stages if not stage.kind.is_layer or first <= stage.index < first + count]
    return replace(
        shape,
        stages=tuple(replace(stage, index=index) for index, stage in enumerate(stages)),
        kv_layer_bytes=shape.kv_layer_bytes[:count],
        kv_heads=shape.kv_heads[:count],
        bounded_layers=frozenset(layer for layer in shape.bounded_layers if layer < count),
        state_bytes_per_sequence=-(-shape.state_bytes_per_sequence * count // len(layers)),
        kv_tail_bytes_per_sequence=-(-shape.kv_tail_bytes_per_sequence * count // len(layers)),
    )


def _cut_parameter(parameter: Parameter, num_experts: int, num_parts: int) -> Parameter:
    shape = parameter.shape
    if len(shape) < 2 or shape[-2] % num_parts or shape == (num_experts, shape[-1]):
        return parameter
    pieces = tuple(tuple(_cut_slice(piece, num_parts) for piece in entry) for entry in parameter.pieces)
    return replace(parameter, shape=(*shape[:-2], shape[-2] // num_parts, shape[-1]), pieces=pieces)


def _cut_slice(piece: TensorSlice, num_parts: int) -> TensorSlice:
    """Returns the slice with shape and size of one rank's rows, for planning only; all bytes if interleaved."""
    shape = piece.shape
    rows = (*shape[:-2], -(-shape[-2] // num_parts), shape[-1]) if len(shape) > 1 else shape
    companions = tuple(replace(c, tensor=_cut_slice(c.tensor, num_parts)) for c in piece.companions)
    num_bytes = piece.num_bytes if piece.is_interleaved else -(-piece.num_bytes // num_parts)
    return replace(piece, num_bytes=num_bytes, shape=rows, companions=companions)


def split_stages(stages: Sequence[Stage], count: int, *, count_embeddings: bool = False) -> tuple[range, ...]:
    """Assigns contiguous layers to `count` ranks so that the largest rank has the fewest bytes.

    Embeddings go with the first layer, norm and head with the last. Embeddings cost memory but hardly time, as a token
    reads one row: `count_embeddings` balances memory instead of time. Raises ConfigError for fewer layers than ranks.
    """
    layers = [stage.index for stage in stages if stage.kind is StageKind.layer]
    require(
        len(layers) >= count,
        f"devices=pipeline: {count} ranks for {len(layers)} layers: start at most {len(layers)} ranks",
    )
    weights = [stages[index].num_bytes for index in layers]
    weights[0] += stages[0].num_bytes if count_embeddings else 0
    weights[-1] += stages[-1].num_bytes
    # Dynamic programming over non-empty groups: bytes of the largest group, and the first layer of each.
    ends = [0, *accumulate(weights)]
    best = [(float(end), [0]) for end in ends]  # one group, by its number of layers
    for size in range(2, count + 1):
        candidates = best[:size]
        for end in range(size, len(ends)):
            pairs = ((max(best[cut][0], ends[end] - ends[cut]), cut) for cut in range(size - 1, end))
            heaviest, cut = min(pairs)
            candidates.append((heaviest, [*best[cut][1], cut]))
        best = candidates
    firsts = best[-1][1]
    begins = [0, *(layers[first] for first in firsts[1:])]
    return tuple(range(begin, end) for begin, end in zip(begins, [*begins[1:], len(stages)], strict=True))


def restrict_to_stages(shape: ModelShape, stages: range) -> ModelShape:
    """Returns the model with only these stages on this rank; the others have no weights, KV cache or states here."""
    first = shape.layers[0].index
    is_own = [first + layer in stages for layer in range(len(shape.kv_layer_bytes))]
    kv = tuple(own * size for own, size in zip(is_own, shape.kv_layer_bytes, strict=True))
    states = shape.state_layer_bytes or (shape.state_bytes_per_sequence,) * len(is_own)
    states = tuple(own * size for own, size in zip(is_own, states, strict=True))
    return replace(
        shape,
        stages=tuple(s if s.index in stages else replace(s, parameters=(), num_experts=0) for s in shape.stages),
        kv_layer_bytes=kv,
        state_bytes_per_sequence=sum(states),
        state_layer_bytes=states,
        kv_tail_bytes_per_sequence=-(-shape.kv_tail_bytes_per_sequence * sum(kv) // max(1, sum(shape.kv_layer_bytes))),
        rank_stages=stages,
    )
