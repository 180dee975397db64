"""What is to be planned, and one run that it could come to: its blocks, prompts in chunks of so many tokens, placed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...batching.balance import Block, plan_blocks
from ...batching.prefixes import SharedPrefix
from ...config.settings import Admission, Prefetch, PrefetchConfig, RuntimeConfig
from ..cost.cpu_share import with_share
from ..cost.predict import Prediction, decode_pass_seconds, predict
from ..cost.rates import MachineRates
from ..placement.defaults import chunk_tokens, in_chunks
from ..placement.load import Load
from ..placement.memory import SequenceSize
from ..placement.placement import Budgets, Placement
from ..placement.placer import place
from ..placement.run_load import bare, run_load
from ..shape.model import ModelShape
from .policy import Policy

RUN = 64  # requests, of a sample
MAX_DEPTH = 4  # cost_aware: deeper look-ahead than this only takes memory from resident layers


@dataclass(frozen=True, kw_only=True)
class PlacedRun:
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
class Problem:
    """A model and its requests, a machine's budgets and rates, and the settings that a plan must keep to."""

    shape: ModelShape
    config: RuntimeConfig
    budgets: Budgets
    sizes: Sequence[SequenceSize]
    rates: MachineRates | None

    def of(self, policy: Policy) -> "Problem":
        """The problem with `policy` in the place of a search."""
        return replace(self, config=policy.applied(self.config, has_device=self.budgets.has_device))

    def blocks_of(self, policy: Policy) -> tuple[Block, ...]:
        """All requests in blocks of the policy's sizes."""
        return self.blocks(policy.micro_batch_size, policy.num_micro_batches)

    def blocks(self, micro_batch_size: int, num_micro_batches: int) -> tuple[Block, ...]:
        """All requests in blocks of up to so many micro-batches of up to so many sequences."""
        return plan_blocks(
            [size.capacity_tokens for size in self.sizes],
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            is_packed=self.shape.is_packed,
            prefixes=self._prefixes,
            in_line=self.config.policy.admission is Admission.continuous,
            num_beams=self.sizes[0].num_beams if self.sizes else 1,
        )

    @cached_property
    def _prefixes(self) -> Sequence[SharedPrefix | None]:
        return [size.prefix for size in self.sizes] if self.shape.is_packed else ()

    def some(self, count: int) -> "Problem":
        """The problem for so many of its requests, evenly; of those that begin alike runs of neighbours."""
        if count >= len(self.sizes):
            return self
        runs = [self._alike[begin : begin + RUN] for begin in range(0, len(self._alike), RUN)]
        num_taken = -(-count // RUN)
        taken = [each for turn in range(num_taken) for each in runs[turn * len(runs) // num_taken]]
        return replace(self, sizes=taken[:count])

    @cached_property
    def _alike(self) -> Sequence[SequenceSize]:
        """All sizes in the order of the trie of their prefixes."""
        met = dict[SharedPrefix, int]()

        def path(size: SequenceSize) -> list[int]:
            chain = size.prefix.chain if size.prefix is not None else ()
            return [met.setdefault(each, len(met)) for each in chain][::-1]

        return sorted(self.sizes, key=path)

    def placed(self, blocks: tuple[Block, ...], num_tokens: int) -> PlacedRun:
        """The run of these blocks with prompts in chunks of `num_tokens`."""
        shape, budgets, config = self.shape, self.budgets, in_chunks(self.config, num_tokens)
        load = run_load(shape, config, budgets, blocks, self.sizes)
        if config.prefetch.kind is Prefetch.cost_aware and self.rates is not None:
            prefetch, placement = self._cost_aware(config, load, self.rates)
        else:
            prefetch = bare(config).prefetch
            placement = self.place(replace(config, prefetch=prefetch), load)
        return PlacedRun(blocks=blocks, config=config, load=load, prefetch=prefetch, placement=placement)

    def predicted(self, run: PlacedRun) -> Prediction | None:
        """How long `run` takes; None where there are no rates to predict by."""
        if self.rates is None:
            return None
        admission = run.config.policy.admission
        return predict(self.shape, run.placement, run.blocks, self.sizes, run.chunk_tokens, self.rates, admission)

    def place(self, config: RuntimeConfig, load: Load) -> Placement:
        """The placement of a load, with what of it follows from the rates."""
        return with_share(self.shape, place(self.shape, config, self.budgets, load), self.rates)

    def _cost_aware(self, config: RuntimeConfig, load: Load, rates: MachineRates) -> tuple[PrefetchConfig, Placement]:
        """The depth, with as many resident layers as then fit, whose simulated decode pass is the shortest."""
        best: tuple[float, PrefetchConfig, Placement] | None = None
        for depth in range(1, MAX_DEPTH + 1):
            prefetch = PrefetchConfig(kind=Prefetch.lookahead, depth=depth)
            placement = self.place(replace(config, prefetch=prefetch), load)
            seconds = decode_pass_seconds(self.shape, placement, load.lanes, rates)
            if best is None or (placement.fits and seconds < 0.99 * best[0]):
                best = (seconds, prefetch, placement)
        assert best is not None
        return best[1], best[2]
