"""One way that a run could go: its blocks, prompts in chunks of so many tokens, placed; and how long it takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...batching.balance import Block
from ...config import Prefetch, PrefetchConfig, RuntimeConfig
from ..cost.predict import Prediction, decode_pass_seconds, predict
from ..cost.rates import MachineRates
from ..placement.defaults import chunk_tokens, in_chunks
from ..placement.load import Load
from ..placement.memory import SequenceSize
from ..placement.placement import Budgets, Placement
from ..placement.placer import place
from ..placement.run_load import bare, run_load
from ..shape.model import ModelShape

MAX_DEPTH = 4  # cost_aware: deeper look-ahead than this only takes memory from resident layers


@dataclass(frozen=True, kw_only=True)
class Way:
    """`config` says the tokens of a prefill pass. Its placement need not fit."""

    blocks: tuple[Block, ...]
    config: RuntimeConfig
    load: Load
    prefetch: PrefetchConfig  # as resolved: cost_aware has become a depth
    placement: Placement

    @property
    def chunk_tokens(self) -> int:
        return chunk_tokens(self.config.policy)


@dataclass(frozen=True, kw_only=True)
class Road:
    """What all ways of a run have in common."""

    shape: ModelShape
    config: RuntimeConfig
    budgets: Budgets
    sizes: Sequence[SequenceSize]
    rates: MachineRates | None

    def way(self, blocks: tuple[Block, ...], num_tokens: int) -> Way:
        """With chunks of `num_tokens`."""
        shape, budgets, config = self.shape, self.budgets, in_chunks(self.config, num_tokens)
        load = run_load(shape, config, budgets, blocks, self.sizes)
        if config.prefetch.kind is Prefetch.cost_aware and self.rates is not None:
            prefetch, placement = _cost_aware(shape, config, budgets, load, self.rates)
        else:
            prefetch = bare(config).prefetch
            placement = place(shape, replace(config, prefetch=prefetch), budgets, load)
        return Way(blocks=blocks, config=config, load=load, prefetch=prefetch, placement=placement)

    def predicted(self, way: Way) -> Prediction | None:
        """None where there are no rates to predict by."""
        if self.rates is None:
            return None
        admission = way.config.policy.admission
        return predict(self.shape, way.placement, way.blocks, self.sizes, way.chunk_tokens, self.rates, admission)


def _cost_aware(
    shape: ModelShape, config: RuntimeConfig, budgets: Budgets, load: Load, rates: MachineRates
) -> tuple[PrefetchConfig, Placement]:
    """Of each depth, with as many resident layers as then fit, the one whose simulated decode pass is the shortest."""
    best: tuple[float, PrefetchConfig, Placement] | None = None
    for depth in range(1, MAX_DEPTH + 1):
        prefetch = PrefetchConfig(kind=Prefetch.lookahead, depth=depth)
        placement = place(shape, replace(config, prefetch=prefetch), budgets, load)
        seconds = decode_pass_seconds(shape, placement, load.lanes, rates)
        if best is None or (placement.fits and seconds < 0.99 * best[0]):
            best = (seconds, prefetch, placement)
    assert best is not None
    return best[1], best[2]
