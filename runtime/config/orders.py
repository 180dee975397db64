"""The orders in which lanes pass the stages, and what each of them means for schedules, memory and time.

A **turn** is one lane in one stage. Turns follow each other stage by stage, and in a stage lane by lane, so that one
read of a stage serves the whole block. What else an order is about stands in its `Style`, and nowhere else.
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Style:
    """`num_ahead`: turns that stand at their attention on the CPU while the one before them goes on from its own."""

    num_ahead: int = 1
    crosses_stages: bool = False  # they may be turns of the next stage
    has_barriers: bool = False
    spreads_pages: bool = False  # the pages of a stage come turn by turn, not in one go
    batches_experts: bool = False  # a layer's experts run once, over all lanes

    @property
    def num_slots(self) -> int:
        """Slots of weights at least: pages come into one while the stage in the other is computed."""
        return 2 if self.spreads_pages else 1

    @property
    def num_open(self) -> int:
        """Stages that are computed at once: where turns cross, one is not yet left when the next is begun."""
        return 2 if self.crosses_stages else 1

    @property
    def needs_cpu_attention(self) -> bool:
        """Whether the order is about attention on the CPU alone: nothing else lets a lane go on to the next stage."""
        return self.crosses_stages


class Order(Enum):
    """Each by its name in the settings, with its `style`.

    - zigzag: while the CPU attends for a turn, the device begins the next one of the stage.
    - flexgen: turn after turn, with a barrier behind each (FlexGen, Sheng et al. 2023, section 4.2).
    - cgopipe: as zigzag, but the next turn may be the next stage's (MoE-Lightning, Cao et al. 2025, Algorithm 1): while
      the CPU attends for turns t+1 and t+2, the device does `post` of turn t and `pre` of turn t+2. The weights of the
      next stage come page by page between the two.
    - module_batched: as zigzag; it differs in having stages with routing (MoE-Gen, Xu et al. 2025).
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
        """The order of passes in which the CPU does not attend, as those of prompts."""
        return PLAIN if self.style.needs_cpu_attention else self


PLAIN = next(order for order in Order if order.style == Style())
BATCHED = next(order for order in Order if order.style.batches_experts)
