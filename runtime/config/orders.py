"""Orders of a schedule: in which sequence the computations of a block are run.

A block is a group of lanes (micro-batches) that are decoded together. A stage is the weights of one part of the
forward, such as a layer. A **turn** is the computation of one lane in one stage. In every order, all lanes of a block
run a stage before the next stage begins, so each stage is read once for the whole block. `Style` has the properties in
which orders differ.
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Style:
    """Properties of an order. `num_ahead`: how many later turns may already be waiting for CPU attention when a turn
    continues after its attention."""

    num_ahead: int = 1
    crosses_stages: bool = False  # these later turns may belong to the next stage
    has_barriers: bool = False  # all transfers end before the next turn begins
    spreads_pages: bool = False  # the parts (pages) of a stage's weights are copied between turns, not all at once
    batches_experts: bool = False  # a layer's experts run once over the tokens of all lanes

    @property
    def num_slots(self) -> int:
        """Minimum number of weight slots, buffers for one stage each. With `spreads_pages`, one slot is filled while
        the other is in use."""
        return 2 if self.spreads_pages else 1

    @property
    def num_open(self) -> int:
        """Number of stages that may be computed at the same time."""
        return 2 if self.crosses_stages else 1

    @property
    def needs_cpu_attention(self) -> bool:
        """True if the order requires attention on the CPU: only while a lane waits for the CPU can another lane enter
        the next stage."""
        return self.crosses_stages


class Order(Enum):
    """The orders, with their names in the settings and their `style`.

    - zigzag: while the CPU computes a turn's attention, the device begins the next turn of the stage.
    - flexgen: one turn after another, with a barrier after each (FlexGen, Sheng et al. 2023, section 4.2).
    - cgopipe: like zigzag, but the next turn may belong to the next stage (MoE-Lightning, Cao et al. 2025, Algorithm
      1). While the CPU computes attention for turns t+1 and t+2, the device runs turn t after attention (`post`) and
      turn t+2 before attention (`pre`). Weights of the next stage are copied in between.
    - module_batched: like zigzag, but a layer's experts run once for all lanes (MoE-Gen, Xu et al. 2025).
    """

    zigzag = "zigzag", Style()
    flexgen = "flexgen", Style(num_ahead=0, has_barriers=True, spreads_pages=True)
    cgopipe = "cgopipe", Style(crosses_stages=True, spreads_pages=True)
    module_batched = "module_batched", Style(batches_experts=True)

    style: Style

    def __new__(cls, name: str, style: Style) -> "Order":
        member = object.__new__(cls)
        member._value_, member.style = name, style
        return member

    @property
    def without_cpu_attention(self) -> "Order":
        """The order to use for passes without CPU attention, such as prefill."""
        return PLAIN if self.style.needs_cpu_attention else self


PLAIN = next(order for order in Order if order.style == Style())
BATCHED = next(order for order in Order if order.style.batches_experts)
