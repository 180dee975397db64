"""The model as one of several ranks has it: an equal share of each matrix, or some of the layers."""

from dataclasses import replace

from ...config.settings import DividedExperts
from ...errors import require
from .expert_shares import has_whole, runs_of, take_experts
from .model import ModelShape
from .shapes import Companion, Parameter, Stage, TensorSlice


def tensor_share(shape: ModelShape, num_ranks: int, experts: DividedExperts = DividedExperts.auto) -> ModelShape:
    """The shape that the first rank has of a model whose matrices are cut by rows, which are outputs, and whose KV
    heads are shared out. Of a layer's experts it has rows of each, or some whole, as `experts` says. Whole on every
    rank are hidden states, what lies around the layers, vectors, routers, and matrices whose rows are no multiple of
    the ranks. Raises ConfigError where keys and values cannot be shared out, as a run
    would."""
    heads, other = shape.num_kv_heads, "take devices=sharded or pipeline"
    is_equal = heads % num_ranks == 0 and shape.num_heads % num_ranks == 0
    whole = "latents, which are of all heads" if shape.expanded_kv_width else "padded lanes, which keep all heads"
    require(shape.is_packed and not shape.expanded_kv_width, f"devices=tensor: model={shape.name} has {whole}: {other}")
    require(
        is_equal,
        f"devices=tensor: model={shape.name} has {heads} KV heads, which {num_ranks} ranks cannot share equally: set "
        f"plan.num_ranks, or {other}",
    )
    with_whole = {s.index for s in shape.layers if has_whole(s, shape.hidden_size, num_ranks, experts)}
    stages = tuple(
        _cut_stage(stage, num_ranks, is_whole=stage.index in with_whole) if stage.kind.is_layer else stage
        for stage in shape.stages
    )
    return replace(
        shape,
        stages=stages,
        num_heads=shape.num_heads // num_ranks,
        num_kv_heads=heads // num_ranks,
        intermediate_size=shape.intermediate_size if with_whole else -(-shape.intermediate_size // num_ranks),
        score_heads=-(-shape.score_heads // num_ranks),
        kv_layer_bytes=tuple(-(-size // num_ranks) for size in shape.kv_layer_bytes),
        kv_heads=tuple((-(-count // num_ranks), key, value) for count, key, value in shape.kv_heads),
        kv_tail_bytes_per_sequence=-(-shape.kv_tail_bytes_per_sequence // num_ranks),
    )


def pipeline_share(shape: ModelShape, num_ranks: int) -> ModelShape:
    """The shape of the rank that has most: its share of the layers, and what lies around them. Raises ConfigError where
    there are fewer layers than ranks."""
    layers = shape.layers
    require(
        len(layers) >= num_ranks,
        f"devices=pipeline: model={shape.name} has {len(layers)} layers for {num_ranks} ranks: lower plan.num_ranks",
    )
    count = -(-len(layers) // num_ranks)
    first = layers[0].index
    kept = [stage for stage in shape.stages if not stage.kind.is_layer or first <= stage.index < first + count]
    return replace(
        shape,
        stages=tuple(replace(stage, index=index) for index, stage in enumerate(kept)),
        kv_layer_bytes=shape.kv_layer_bytes[:count],
        kv_heads=shape.kv_heads[:count],
        bounded_layers=frozenset(layer for layer in shape.bounded_layers if layer < count),
        state_bytes_per_sequence=-(-shape.state_bytes_per_sequence * count // len(layers)),
        kv_tail_bytes_per_sequence=-(-shape.kv_tail_bytes_per_sequence * count // len(layers)),
    )


def _cut_stage(stage: Stage, num_parts: int, *, is_whole: bool) -> Stage:
    first = runs_of(stage.num_experts, num_parts)[0]
    parts = [take_experts(p, first) if is_whole and p.is_experts else None for p in stage.parameters]
    pairs = zip(stage.parameters, parts, strict=True)
    return replace(
        stage, parameters=tuple(part or _cut_parameter(p, stage.num_experts, num_parts) for p, part in pairs)
    )


def _cut_parameter(parameter: Parameter, num_experts: int, num_parts: int) -> Parameter:
    shape = parameter.shape
    if len(shape) < 2 or shape[-2] % num_parts or shape == (num_experts, shape[-1]):
        return parameter
    pieces = tuple(tuple(_cut_slice(piece, num_parts) for piece in entry) for entry in parameter.pieces)
    return replace(parameter, shape=(*shape[:-2], shape[-2] // num_parts, shape[-1]), pieces=pieces)


def _cut_slice(piece: TensorSlice, num_parts: int) -> TensorSlice:
    """A slice of as many bytes as a rank's rows have, which are all where rows do not lie apart; of a stack, those of
    all experts in one piece."""
    shape = piece.shape
    rows = (*shape[:-2], -(-shape[-2] // num_parts), shape[-1]) if len(shape) > 1 else shape
    companions = tuple(
        Companion(
            role=each.role,
            tensor=_cut_slice(each.tensor, num_parts),
            block_rows=each.block_rows,
            block_columns=each.block_columns,
        )
        for each in piece.companions
    )
    num_bytes = piece.num_bytes if piece.is_interleaved else -(-piece.num_bytes // num_parts)
    return replace(piece, num_bytes=num_bytes, shape=rows, companions=companions)
