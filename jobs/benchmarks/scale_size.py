"""What is doubled: the sizes of a small Llama and of what it is asked for."""

from dataclasses import dataclass, replace

from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.units import round_up

HEAD_DIM, LANE_SIZE, NUM_NEW_TOKENS = 64, 64, 9
KV_BYTES = 2 * HEAD_DIM * 4  # of a position in a layer: one head of keys and one of values, in float32


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of all `block` prompts each has `prompt_tokens`."""

    num_layers: int = 4
    vocab_size: int = 2048
    prompt_tokens: int = 64
    block: int = 32
    hidden_size: int = 384

    def doubled(self, quantity: str, times: int) -> "Size":
        return replace(self, **{quantity: getattr(self, quantity) << times})

    @property
    def kv_bytes(self) -> int:
        """At the end, in whole pages."""
        return self.num_layers * self.block * round_up(self.prompt_tokens + NUM_NEW_TOKENS, PAGE_TOKENS) * KV_BYTES

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers, vocabulary {self.vocab_size}, prompts of {self.prompt_tokens}, "
            f"block {self.block}"
        )


QUANTITIES = ("num_layers", "vocab_size", "prompt_tokens", "block")
NUM_DOUBLINGS = 3


def sizes(base: Size) -> dict[str, list[Size]]:
    """By what is doubled, from `base` on: every quantity's first is the same."""
    return {quantity: [base.doubled(quantity, turn) for turn in range(NUM_DOUBLINGS + 1)] for quantity in QUANTITIES}
