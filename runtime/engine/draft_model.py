"""Guesses the next tokens of sequences with a small model that stays in memory: speculative decoding (Leviathan et al.
2023), where a guess counts if it is the token that the large model's sampler chooses.

The small model draws with a copy of each sequence's own random generator, so both models get the same noise. Where
their probabilities are similar, they then mostly draw the same token.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..cache.pages import num_pages_for
from ..closing import Closing
from ..config.settings import MAX_DRAFT_TOKENS, KVConfig, PolicyConfig, PolicyKind, SamplingConfig, Tier
from ..errors import ConfigError
from ..model.loading import LoadedModel
from ..plan.placement.defaults import chunk_tokens
from ..plan.placement.memory import SequenceSize
from ..plan.placement.placement import Budgets
from ..plan.planner import plan_run
from ..sequences.sampler import Sampler
from ..sequences.sequence import Sequence
from ..store.reader import Reader
from ..stream.weight_cache import WeightCache
from .batcher import Batch, Batcher
from .engine import Engine
from .lanes.packed import PackedLane
from .records import Phase
from .setup import Setup, open_streams


def require_packed(draft: LoadedModel) -> None:
    """Raises ConfigError if the model's tokens cannot be taken back."""
    if not draft.shape.is_packed or draft.rope_lengths is not None:
        raise ConfigError(
            f"{draft.shape.name} needs padded lanes, from which no tokens can be taken back: set another model, or null"
        )


def require_same_tokens(draft: LoadedModel, model: LoadedModel) -> None:
    """Raises ConfigError unless tokens have the same ids in both models, and the small one can guess."""
    require_packed(draft)
    if draft.tokenizer is None or model.tokenizer is None:
        raise ConfigError("both models need a tokenizer, to compare their tokens")
    known, other = model.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    num_other = len({token for token, index in known.items() if other.get(token) != index})
    if num_other:
        raise ConfigError(
            f"{num_other:,} of the model's {len(known):,} tokens are missing or have another id there, so its guesses "
            "would be other texts: set a smaller model of the same family, or null"
        )


class DraftSampler(Sampler):
    """Samples for the small model as the large one's sampler does, from as many logits per token."""

    def __init__(self, config: SamplingConfig, model: LoadedModel, device: torch.device):
        shape = model.shape
        plain = replace(config, logprobs=0)
        super().__init__(plain, vocab_size=shape.vocab_size, tokenizer=model.tokenizer, device=device)
        self._num_logits = shape.vocab_size

    def sample(self, sequences: Rows[Sequence], logits_BV: torch.Tensor) -> torch.Tensor:
        missing = self._num_logits - logits_BV.shape[-1]  # models of a family may pad their vocabularies differently
        fitted_BV = torch.nn.functional.pad(logits_BV, (0, missing), value=float("-inf")) if missing else logits_BV
        return super().sample(sequences, fitted_BV)


class _OneLane(Batcher):
    """Runs `new_tokens[i]` tokens of sequence i of a lane in each pass."""

    def __init__(self, lane: PackedLane):
        super().__init__()
        self.lane, self.new_tokens = lane, list[int]()

    def next_batch(self) -> Batch | None:
        phase = Phase.decode if max(self.new_tokens) == 1 else Phase.prefill
        return self._make_batch(phase, [self.lane], [self.new_tokens])

    def close(self) -> None:
        self.lane.close()


class DraftModel(Closing):
    """Guesses with `engine`, which runs the small model. Each sequence of the large model has a shadow here, with its
    own keys and values. Sequences that do not fit into the small model's context or pages get no guesses."""

    needs_hidden = False

    def __init__(self, engine: Engine, model: LoadedModel, *, chunk_tokens: int):
        self._engine, self._chunk_tokens, self._context_tokens = engine, chunk_tokens, model.shape.context_tokens
        self._batcher = _OneLane(engine.lanes.packed([]))
        self._shadows: dict[tuple[str, int], Sequence] = {}  # by key of the request

    def close(self) -> None:
        self._batcher.close()
        self._shadows.clear()

    def guess(self, wanted: Rows[tuple[Sequence, int]]) -> list[list[int]]:
        """Returns the small model's next tokens of each sequence, at most the given number."""
        lane = self._batcher.lane
        num_held = dict(zip(map(id, lane.sequences), map(len, lane.cache.table.pages), strict=True))
        num_free, shadows, ends = self._engine.lanes.num_free_pages, list[Sequence | None](), dict[int, int]()
        for sequence, most in wanted:
            shadow = self._shadows.get(sequence.request.key)
            num_tokens = sequence.num_known + most
            num_pages = max(0, num_pages_for(num_tokens) - num_held.get(id(shadow), 0))
            if num_tokens > self._context_tokens or num_pages > num_free:
                shadows.append(None)
                continue
            num_free -= num_pages
            shadows.append(shadow := self._follow(sequence, shadow))
            ends[id(shadow)] = len(shadow.generated) + most  # number of tokens at which it has guessed enough
        while any(new_tokens := self._choose_tokens(ends)):
            self._batcher.new_tokens = new_tokens
            self._engine.step(self._batcher)
        pairs = zip(shadows, wanted, strict=True)
        return [
            [] if shadow is None else shadow.generated[len(sequence.generated) :] for shadow, (sequence, _) in pairs
        ]

    def show_hidden(self, computed: Rows[tuple[Sequence, int, torch.Tensor]]) -> None:
        raise AssertionError("a model of its own reads tokens only")

    def leave(self, sequence: Sequence) -> None:
        """Forgets a sequence and frees its pages."""
        shadow = self._shadows.pop(sequence.request.key, None)
        if shadow is not None and shadow.finish is None:
            self._batcher.lane.leave(shadow)

    def _choose_tokens(self, ends: Mapping[int, int]) -> list[int]:
        """The number of tokens of each shadow in the next pass. `ends`: by id of a shadow, the number of generated
        tokens at which it has guessed enough."""
        counts, left = list[int](), self._chunk_tokens
        for shadow in self._batcher.lane.sequences:
            is_done = len(shadow.generated) >= ends.get(id(shadow), 0)
            counts.append(0 if is_done else min(left, shadow.num_known - shadow.num_cached))
            left -= counts[-1]
        return counts

    def _follow(self, sequence: Sequence, shadow: Sequence | None) -> Sequence:
        """Returns the sequence's shadow, a new one if there is none, with the same tokens and a copy of the random
        generator."""
        lane = self._batcher.lane
        if shadow is None or shadow.finish is not None:
            request = replace(sequence.request, grammar=None, stop=(), ignore_eos=True)
            shadow = self._shadows[request.key] = Sequence(request=request)
            lane.enter(shadow)
        num_equal = max(0, len(shadow.generated) - MAX_DRAFT_TOKENS)  # only the last tokens may be guesses
        for own, other in zip(shadow.generated[num_equal:], sequence.generated[num_equal:], strict=False):
            if own != other:
                break
            num_equal += 1
        num_cached = min(shadow.num_cached, len(sequence.request.prompt_ids) + num_equal, sequence.num_known - 1)
        shadow.generated[:] = sequence.generated
        if num_cached < shadow.num_cached:
            lane.take_back(shadow, num_cached)
        copy_generator(sequence, shadow)
        return shadow


def copy_generator(sequence: Sequence, shadow: Sequence) -> None:
    """Gives `shadow` a copy of the sequence's random generator."""
    shadow.generator = None
    if (generator := sequence.generator) is not None:
        shadow.generator = torch.Generator(generator.device)
        shadow.generator.set_state(generator.get_state())


@contextmanager
def open_draft_model(
    draft: LoadedModel,
    setup: Setup,
    reader: Reader,
    should_stop: Callable[[], bool],
    *,
    num_rows: int,
    weight_cache: WeightCache | None = None,
    kind: type[DraftModel] = DraftModel,
) -> Iterator[DraftModel]:
    """Reads the weights of a small model that guesses for `num_rows` sequences of an engine with `setup`. `reader`: of
    the small model's weights. `weight_cache`: has those that earlier sessions read. `kind`: how it guesses."""
    config, device = setup.config, setup.device
    policy = PolicyConfig(
        kind=PolicyKind.fixed,
        micro_batch_size=num_rows,
        num_micro_batches=1,
        draft_tokens=0,
        prefill_chunk_tokens=chunk_tokens(config.policy),
    )
    own_config = replace(config, policy=policy, offload=replace(config.offload, tier=Tier.none), kv=KVConfig())
    unlimited = 1 << 60  # the ledger of the large model counts the small one's memory
    budgets = Budgets(host_bytes=unlimited, device_bytes=unlimited if device.is_accelerator else None)
    sizes = [SequenceSize(num_prompt_tokens=1, max_new_tokens=1)] * num_rows
    placement = plan_run(draft.shape, own_config, budgets, sizes).placement
    # Guesses may begin a page beyond those that the large model's sequences need.
    kv = replace(placement.kv, num_pages=setup.placement.kv.num_pages + num_rows)
    own = Setup(
        model=draft,
        config=own_config,
        placement=replace(placement, kv=kv),
        device=device,
        trace=None,
        weight_cache=weight_cache,
    )
    with open_streams(own, reader) as streams:
        sampler = DraftSampler(config.sampling, setup.model, device.torch_device)
        engine = Engine(own, streams, sampler, should_stop)
        with kind(engine, draft, chunk_tokens=chunk_tokens(policy)) as model:
            yield model
