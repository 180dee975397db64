"""A model shape made of numbers alone: embeddings, equal layers, head; one file, tensors one behind the other. The
decoder behind an encoder begins with the same embeddings."""

from collections.abc import Sequence
from dataclasses import replace

from runtime.plan.placement.memory import SequenceSize
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Parameter, Stage, StageKind, TensorSlice
from runtime.units import MIB

HIDDEN, VOCAB = 256, 8192  # embeddings and head: 8 MiB each in float32
LAYER_ROWS = 4096  # a layer: 4 MiB


def toy_shape(
    num_layers: int = 8, *, is_tied: bool = False, is_packed: bool = True, num_encoder_layers: int = 0
) -> ModelShape:
    encoder = [*[StageKind.encoder] * num_encoder_layers, StageKind.bridge] if num_encoder_layers else []
    kinds = [StageKind.embedding, *encoder, *[StageKind.layer] * num_layers, StageKind.head]
    offset, stages = 4096, []
    for index, kind in enumerate(kinds):
        num_rows = LAYER_ROWS if kind.is_layer else VOCAB
        num_bytes = num_rows * HIDDEN * 4
        piece = TensorSlice(
            name=f"w{index}", file="model", offset=offset, num_bytes=num_bytes, dtype="F32", shape=(num_rows, HIDDEN)
        )
        if kind is StageKind.bridge or (kind is StageKind.head and is_tied):
            piece = stages[0].parameters[0].slices[0]
        parameter = Parameter(name=f"w{index}", shape=piece.shape, pieces=((piece,),))
        stages.append(Stage(index=index, name=f"stage {index}", kind=kind, parameters=(parameter,)))
        offset += num_bytes + MIB
    return ModelShape(
        name="toy",
        stages=tuple(stages),
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        context_tokens=2048,
        kv_layer_bytes=(2 * 2 * 64 * 4,) * num_layers,
        compute_dtype_bytes=4,
        is_packed=is_packed,
        cross_kv_bytes_per_token=2 * num_layers * 2 * 64 * 4 if num_encoder_layers else 0,
    )


def toy_mixture(num_layers: int = 8, num_experts: int = 8) -> ModelShape:
    """The same bytes, of which each layer's are those of its experts."""

    def mixture(stage: Stage) -> Stage:
        if stage.kind is not StageKind.layer:
            return stage
        (parameter,) = stage.parameters
        shape = (num_experts, LAYER_ROWS // num_experts, HIDDEN)
        piece = replace(parameter.slices[0], shape=shape)
        stack = replace(parameter, shape=shape, pieces=((piece,),), is_experts=True)
        return replace(stage, parameters=(stack,), num_experts=num_experts, num_experts_per_token=2)

    shape = toy_shape(num_layers)
    return replace(shape, stages=tuple(map(mixture, shape.stages)), has_bare_experts=True)


def sizes_of(num_prompt_tokens: Sequence[int], max_new_tokens: int = 16) -> list[SequenceSize]:
    return [SequenceSize(num_prompt_tokens=n, max_new_tokens=max_new_tokens) for n in num_prompt_tokens]
