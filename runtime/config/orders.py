"""Schedule orders: the order of lanes and stages, with its effect on schedules, memory and time.

A **turn** is one lane in one stage. All lanes of a block run a stage before the next stage begins: one read of its
weights serves the whole block. `Style` holds everything else that depends on the order.
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Style:
    """Properties of an order. `num_ahead`: later turns that may wait for CPU attention while a turn continues after its
    own attention."""

    num_ahead: int = 1
    crosses_stages: bool = False  # turns ahead may belong to the next stage
    has_barriers: bool = False
    spreads_pages: bool = False  # a stage's weight pages are copied between turns, not all at once
    batches_experts: bool = False  # a layer's experts run once over the tokens of all lanes

    @property
    def num_slots(self) -> int:
        """Minimum number of weight slots: with spread pages, one slot is filled while the other is in use."""
        return 2 if self.spreads_pages else 1

    @property
    def num_open(self) -> int:
        """Stages in progress at once: 2 if turns cross stages."""
        return 2 if self.crosses_stages else 1

    @property
    def needs_cpu_attention(self) -> bool:
        """True if the order requires attention on the CPU, without which a lane cannot enter the next stage early."""
        return self.crosses_stages


class Order(Enum):
    """The orders by their names in the settings, each with its `style`.

    - zigzag: while the CPU computes a turn's attention, the device begins the next turn of the stage.
    - flexgen: one turn after the other, with a barrier after each (FlexGen, Sheng et al. 2023, section 4.2).
    - cgopipe: as zigzag, but the next turn may belong to the next stage (MoE-Lightning, Cao et al. 2025, Algorithm 1):
      while the CPU computes attention for turns t+1 and t+2, the device runs `post` of turn t and `pre` of turn t+2.
      Weight pages of the next stage are copied in between.
    - module_batched: as zigzag, but a layer's experts run once for all lanes (MoE-Gen, Xu et al. 2025).
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
        """The order for passes without CPU attention, such as prefill."""
        return PLAIN if self.style.needs_cpu_attention else self


PLAIN = next(order for order in Order if order.style == Style())
BATCHED = next(order for order in Order if order.style.batches_experts)
