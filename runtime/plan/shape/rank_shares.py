"""One rank's share of a model: rows of each matrix or whole experts (tensor parallelism), or layers (pipeline).

A **rank** is one of the processes that compute a model together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ...config.settings import DividedExperts
from ...errors import require
from .model import ModelShape
from .shapes import Companion, Parameter, Stage, StageKind, TensorSlice, inner_size


@dataclass(frozen=True, kw_only=True)
class RowShare:
    """Share number `index` if the rows of a matrix are divided into `count` equal ranges."""

    index: int
    count: int

    def divides(self, num_rows: int) -> bool:
        return num_rows % self.count == 0

    def rows(self, num_rows: int) -> range:
        """Returns the rows of this share, out of `num_rows`."""
        height = num_rows // self.count
        return range(self.index * height, (self.index + 1) * height)


def cut_rows(parameter: Parameter, share: RowShare, *, num_fused: int = 1) -> Parameter | None:
    """Returns the parameter with one share of its rows. Each matrix of a stack is cut by itself.

    `num_fused`: number of matrices that the rows concatenate, such as 2 for gate and up. Each of them is cut by itself,
    and the parts are concatenated again.

    Returns None if rows are not contiguous in the file, or if a cut would split a block that shares one scale.
    """
    is_one_tensor = len(parameter.shape) == 3 and not parameter.is_stacked  # a stack with all matrices in one tensor
    is_stack = parameter.is_stacked or is_one_tensor
    entries = parameter.pieces
    if is_one_tensor:
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
    """Returns row ranges of the matrix that `pieces` form if concatenated by rows; None if they cannot be separated."""
    slices = list[TensorSlice]()
    for rows in row_ranges:
        begin = 0  # first row of the piece in the matrix
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
    """Returns rows [first, last) of a tensor; None if they split a scaled block or are not contiguous in the file. An
    interleaved tensor mixes the bytes of all rows: its part keeps all bytes, with another first row."""
    height, row_shape = piece.shape[0], piece.shape[1:]
    if piece.is_interleaved:
        return replace(piece, shape=(last - first, *row_shape), first_row=piece.first_row + first)
    row_bytes, remainder = divmod(piece.num_bytes, height)
    rows = [row for run in piece.row_order for row in run][first:last]  # stored row of each row; empty: as stored
    # Permuted rows can be cut only if the file stores exactly these rows in this range, in any order.
    if remainder or piece.is_transposed or (piece.row_order and sorted(rows) != list(range(first, last))):
        return None
    companions = list[Companion]()
    for companion in piece.companions:
        if not companion.is_shared:
            block_rows = companion.block_rows
            if first % block_rows or (last % block_rows and last != height):
                return None
            part = slice_rows(companion.tensor, first // block_rows, -(-last // block_rows))
            if part is None:
                return None
            companion = replace(companion, tensor=part)
        companions.append(companion)
    return replace(
        piece,
        name=f"{piece.name}[{first}:{last}]",
        offset=piece.offset + first * row_bytes,
        num_bytes=(last - first) * row_bytes,
        shape=(last - first, *row_shape),
        companions=tuple(companions),
        row_order=tuple(range(row - first, row - first + 1) for row in rows),  # relative to the part, one row per run
        first_row=piece.first_row + first,
    )


def split_evenly(count: int, num_parts: int) -> Sequence[range]:
    """Splits range(count) into `num_parts` contiguous ranges. Those at the start may be longer by one."""
    base, remainder = divmod(count, num_parts)
    begins = [part * base + min(part, remainder) for part in range(num_parts + 1)]
    return [range(begin, end) for begin, end in pairwise(begins)]


def whole_experts_send_less(hidden_size: int, inner_size: int, num_ranks: int) -> bool:
    """True if ranks exchange fewer numbers with whole experts than with rows of every expert, or equally many.

    Counts the numbers sent for one expert and one token, with r ranks. With whole experts, the rank of the expert sends
    the output to the rank that sums the token's outputs, which is itself in one of r cases: hidden_size * (r - 1) / r.
    With rows of every expert, each rank sends its inner_size / r intermediate activations to the r - 1 other ranks:
    inner_size * (r - 1) in total. In both cases the sum then goes to all ranks.
    """
    return hidden_size <= inner_size * num_ranks


def keeps_experts_whole(stage: Stage, hidden_size: int, num_ranks: int, mode: DividedExperts) -> bool:
    """True if each rank holds whole experts of the stage, not rows of every expert. `mode`: the configured choice."""
    inner = inner_size(stage, hidden_size)
    if not inner or mode is DividedExperts.rows or stage.num_experts < num_ranks:
        return False
    stacks = [stack for stack in stage.stacks if stack.is_experts]
    # Reading some rows of an interleaved stack would read all its bytes.
    is_interleaved = any(piece.is_interleaved for stack in stacks for piece in stack.slices)
    return mode is DividedExperts.whole or is_interleaved or whole_experts_send_less(hidden_size, inner, num_ranks)


def slice_experts(stack: Parameter, experts: range) -> Parameter | None:
    """Returns the stack with these experts only; None if the matrix of an expert is not contiguous in the file. The
    field `num_experts` of the result counts the experts of all ranks."""
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
            part = replace(  # an unquantized stack: the experts' matrices are neighbors in the file
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
    """Returns the shape of the first rank under tensor parallelism, for planning only.

    Matrices are cut by output rows, and KV heads are divided. `experts` decides between rows of every expert and whole
    experts. Every rank has all hidden states, embeddings, head, vectors, routers, and matrices with rows that are not
    divisible by `num_ranks`. Raises ConfigError if the number of heads is not divisible.
    """
    heads, alternatives = shape.num_kv_heads, "devices=sharded or pipeline"
    is_equal = heads % num_ranks == 0 and shape.num_heads % num_ranks == 0
    # The reason in the first message: latents, or lanes that are padded because they are not packed (`is_packed`).
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
        own_experts, is_whole = split_evenly(stage.num_experts, num_ranks)[0], stage.index in whole_stages
        whole_stacks = [slice_experts(p, own_experts) if is_whole and p.is_experts else None for p in stage.parameters]
        pairs = zip(stage.parameters, whole_stacks, strict=True)
        parameters = tuple(stack or _cut_parameter(p, stage.num_experts, num_ranks) for p, stack in pairs)
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
    """Returns the shape of the largest pipeline rank, for planning only.

    It has ceil(layers / ranks) layers, and as an upper bound also the embeddings and the head. Raises ConfigError if
    there are fewer layers than ranks.
    """
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
    """Returns the parameter with one of `num_parts` equal row ranges; vectors and routers unchanged."""
    shape = parameter.shape
    is_router = len(shape) == 2 and shape[0] == num_experts
    if len(shape) < 2 or shape[-2] % num_parts or is_router:
        return parameter
    pieces = tuple(tuple(_cut_slice(piece, num_parts) for piece in entry) for entry in parameter.pieces)
    return replace(parameter, shape=(*shape[:-2], shape[-2] // num_parts, shape[-1]), pieces=pieces)


def _cut_slice(piece: TensorSlice, num_parts: int) -> TensorSlice:
    """Returns the slice with the shape and size of one rank's rows. Rows of interleaved tensors keep all bytes."""
    shape = piece.shape
    rows = (*shape[:-2], -(-shape[-2] // num_parts), shape[-1]) if len(shape) > 1 else shape
    companions = tuple(replace(c, tensor=_cut_slice(c.tensor, num_parts)) for c in piece.companions)
    num_bytes = piece.num_bytes if piece.is_interleaved else -(-piece.num_bytes // num_parts)
    return replace(piece, num_bytes=num_bytes, shape=rows, companions=companions)


def split_stages(stages: Sequence[Stage], count: int, *, count_embeddings: bool = False) -> tuple[range, ...]:
    """Divides stages among `count` ranks by contiguous layers, so that the largest rank has the fewest bytes.

    Embeddings go with the first layer, norm and head with the last. Embeddings take memory but hardly any time, as a
    token reads one row. So `count_embeddings` balances the memory of ranks; without it, their time is balanced.
    Returns the stage numbers of each rank. Raises ConfigError if there are fewer layers than ranks.
    """
    layers = [stage.index for stage in stages if stage.kind is StageKind.layer]
    require(
        len(layers) >= count,
        f"devices=pipeline: {count} ranks for {len(layers)} layers: start at most {len(layers)} ranks",
    )
    weights = [stages[index].num_bytes for index in layers]
    weights[0] += stages[0].num_bytes if count_embeddings else 0
    weights[-1] += stages[-1].num_bytes
    # Dynamic programming over the number of groups. best[n] is the best division of the first n layers: the bytes of
    # its heaviest group, and the first layer of each group. No group may be empty.
    cumulative = [0, *accumulate(weights)]
    best = [(float(num_bytes), [0]) for num_bytes in cumulative]  # with one group
    for num_groups in range(2, count + 1):
        next_best = best[:num_groups]  # too few layers for so many groups: never used
        for end in range(num_groups, len(cumulative)):
            # The last group has layers [cut, end).
            options = (
                (max(best[cut][0], cumulative[end] - cumulative[cut]), cut) for cut in range(num_groups - 1, end)
            )
            heaviest, cut = min(options)
            next_best.append((heaviest, [*best[cut][1], cut]))
        best = next_best
    firsts = best[-1][1]
    begins = [0, *(layers[first] for first in firsts[1:])]
    return tuple(range(begin, end) for begin, end in zip(begins, [*begins[1:], len(stages)], strict=True))


def restrict_to_stages(shape: ModelShape, stages: range) -> ModelShape:
    """Returns the model with only these stages on this rank. All other stages keep their numbers, but have no weights,
    KV cache or recurrent states here."""
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
