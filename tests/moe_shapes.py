"""Shapes of published mixtures of experts, made of numbers alone: in milliseconds, without transformers."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Parameter, Stage, StageKind, TensorSlice

ITEM = 2  # bytes of a number in bfloat16 or float16


@dataclass(frozen=True, kw_only=True)
class Moe:
    name: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    num_experts_per_token: int
    vocab: int
    head_dim: int = 128

    def shape(self, *, is_packed: bool = True) -> ModelShape:
        """Experts in a tensor each, as Mixtral is published."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        dense = [(heads, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, heads)]
        outer = [(self.vocab, self.hidden)]
        kinds = [StageKind.embedding, *[StageKind.layer] * self.num_layers, StageKind.head]
        stages, offset = [], 4096
        for index, kind in enumerate(kinds):
            maker = _Maker(index, offset)
            parameters = [maker.matrix(*rows) for rows in (dense if kind is StageKind.layer else outer)]
            if kind is StageKind.layer:
                parameters.append(maker.matrix(self.num_experts, self.hidden))
                parameters.append(maker.stack(self.num_experts, 2 * self.ffn, self.hidden))
                parameters.append(maker.stack(self.num_experts, self.hidden, self.ffn))
            is_layer = kind is StageKind.layer
            stages.append(
                Stage(
                    index=index,
                    name=f"stage {index}",
                    kind=kind,
                    parameters=tuple(parameters),
                    num_experts=self.num_experts if is_layer else 0,
                    num_experts_per_token=self.num_experts_per_token if is_layer else 0,
                )
            )
            offset = maker.offset
        return ModelShape(
            name=self.name,
            stages=tuple(stages),
            hidden_size=self.hidden,
            intermediate_size=2 * self.ffn,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads if is_packed else self.num_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            context_tokens=32768,
            kv_layer_bytes=(2 * self.num_kv_heads * self.head_dim * ITEM,) * self.num_layers,
            compute_dtype_bytes=ITEM,
            is_packed=is_packed,
        )


class _Maker:
    def __init__(self, stage: int, offset: int):
        self.offset, self._stage, self._count = offset, stage, 0

    def matrix(self, *shape: int) -> Parameter:
        piece = self._piece(shape)
        return Parameter(name=piece.name, shape=shape, pieces=((piece,),))

    def stack(self, *shape: int) -> Parameter:
        pieces = tuple((self._piece(shape[1:]),) for _ in range(shape[0]))
        return Parameter(name=f"experts {self._count}", shape=shape, pieces=pieces, is_stacked=True, is_experts=True)

    def _piece(self, shape: Sequence[int]) -> TensorSlice:
        num_bytes = ITEM
        for size in shape:
            num_bytes *= size
        name = f"w{self._stage}.{self._count}"
        piece = TensorSlice(
            name=name, file="model", offset=self.offset, num_bytes=num_bytes, dtype="BF16", shape=tuple(shape)
        )
        self.offset += num_bytes
        self._count += 1
        return piece


MIXTRAL = Moe(
    name="mixtral", num_layers=32, hidden=4096, ffn=14336, num_heads=32, num_kv_heads=8, num_experts=8,
    num_experts_per_token=2, vocab=32000,
)  # fmt: skip
MIXTRAL_8X22B = Moe(
    name="mixtral-8x22b", num_layers=56, hidden=6144, ffn=16384, num_heads=48, num_kv_heads=8, num_experts=8,
    num_experts_per_token=2, vocab=32000,
)  # fmt: skip
DBRX = Moe(
    name="dbrx", num_layers=40, hidden=6144, ffn=10752, num_heads=48, num_kv_heads=8, num_experts=16,
    num_experts_per_token=4, vocab=100352,
)  # fmt: skip
