"""Guesses tokens with the multi-token prediction (MTP) head of the model's own checkpoint, see model/mtp_head.py.

After each pass, the head reads the hidden states of the tokens that the pass computed, and the tokens after them. So it
has guessed one token when the next pass begins. It guesses further ones from its own hidden states, as vLLM and SGLang
do with a single head.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import replace

import torch

from ..cache.pages import num_pages_for
from ..config.settings import MAX_DRAFT_TOKENS
from ..model.loading import LoadedModel
from ..sequences.sequence import Sequence
from .draft_model import DraftModel, copy_generator
from .engine import Engine


class MtpDrafts(DraftModel):
    """Guesses with `engine`, which runs the head. A sequence's shadow has its tokens from the second one on, since the
    head gets the hidden state of the token before each. Where the hidden states begin later, as behind a shared prefix,
    the shadow begins there. So does one that had to wait for free pages."""

    needs_hidden = True

    def __init__(self, engine: Engine, model: LoadedModel, *, chunk_tokens: int):
        super().__init__(engine, model, chunk_tokens=chunk_tokens)
        assert model.mtp_embedding is not None, "the model is a head"
        self._embedding = model.mtp_embedding
        self._begins = dict[tuple[str, int], int]()  # by key of the request: position of the first hidden state
        self._last_hidden = dict[int, torch.Tensor]()  # by id of a shadow: the head's own, of the newest token

    def close(self) -> None:
        super().close()
        self._embedding.hidden_1TD = None
        self._last_hidden.clear()

    def show_hidden(self, computed: Rows[tuple[Sequence, int, torch.Tensor]]) -> None:
        waiting = dict[int, torch.Tensor]()  # by id of a shadow: hidden states that the head has not read
        num_free = self._engine.lanes.num_free_pages
        for sequence, begin, hidden_TD in computed:
            if (shadow := self._shadow_at(sequence, begin)) is None:
                continue
            if (num_pages := _num_new_pages(shadow, len(hidden_TD))) > num_free:
                self.leave(sequence)
                continue
            num_free -= num_pages
            copy_generator(sequence, shadow)
            waiting[id(shadow)] = hidden_TD
        self._read(waiting)

    def guess(self, wanted: Rows[tuple[Sequence, int]]) -> list[list[int]]:
        shadows = [self._shadows.get(sequence.request.key) for sequence, _ in wanted]
        missing = dict[int, int]()  # by id of a shadow: number of further tokens to guess
        num_free = self._engine.lanes.num_free_pages
        for shadow, (sequence, most) in zip(shadows, wanted, strict=True):
            if shadow is None or shadow.finish is not None:
                continue
            count = most - (len(shadow.generated) - self._num_generated(sequence))
            if count > 0 and (num_pages := _num_new_pages(shadow, count)) <= num_free:
                missing[id(shadow)], num_free = count, num_free - num_pages
        while missing:
            self._read({key: self._last_hidden[key] for key in missing})
            missing = {key: count - 1 for key, count in missing.items() if count > 1 and key in self._last_hidden}
        pairs = zip(shadows, wanted, strict=True)
        return [
            [] if shadow is None else shadow.generated[self._num_generated(sequence) :][:most]
            for shadow, (sequence, most) in pairs
        ]

    def leave(self, sequence: Sequence) -> None:
        if (shadow := self._shadows.get(sequence.request.key)) is not None:
            self._last_hidden.pop(id(shadow), None)
            del self._begins[sequence.request.key]
        super().leave(sequence)

    def _num_generated(self, sequence: Sequence) -> int:
        """Number of tokens in the output of the sequence's shadow that are not guesses."""
        request = self._shadows[sequence.request.key].request
        return sequence.num_known - self._begins[sequence.request.key] - 1 - len(request.prompt_ids)

    def _shadow_at(self, sequence: Sequence, begin: int) -> Sequence | None:
        """The sequence's shadow with all known tokens, whose next hidden state is that at position `begin`. None if the
        head gave no finite numbers for it."""
        lane, key = self._batcher.lane, sequence.request.key
        shadow = self._shadows.get(key)
        if shadow is not None and shadow.finish is not None:
            return None
        index = 0 if shadow is None else begin - self._begins[key]
        if shadow is not None and not 0 <= index <= shadow.num_cached:
            self.leave(sequence)
            shadow, index = None, 0
        if shadow is None:
            self._begins[key], known = begin, sequence.known_ids
            num_prompt = max(len(sequence.request.prompt_ids), begin + 2)  # at least one token is the shadow's prompt
            most = sequence.request.max_new_tokens + MAX_DRAFT_TOKENS + 2  # it must not end before the sequence
            request = replace(
                sequence.request,
                prompt_ids=tuple(known[begin + 1 : num_prompt]),
                max_new_tokens=most,
                grammar=None,
                stop=(),
                ignore_eos=True,
            )
            shadow = self._shadows[key] = Sequence(request=request)
            lane.enter(shadow)
        elif index < shadow.num_cached:
            lane.take_back(shadow, index)
        num_own = self._num_generated(sequence)
        shadow.generated[:] = sequence.generated[len(sequence.generated) - num_own :] if num_own > 0 else ()
        return shadow

    def _read(self, waiting: Mapping[int, torch.Tensor]) -> None:
        """Runs the head on hidden states (T, D), by id of a shadow, and the shadow's next T tokens. Where these are all
        that are known, it guesses a token."""
        lane, left = self._batcher.lane, dict(waiting)
        while left:
            counts, parts, room = list[int](), list[torch.Tensor](), self._chunk_tokens
            shadows = list(lane.sequences)
            for shadow in shadows:
                count = 0
                if (hidden_TD := left.pop(id(shadow), None)) is not None:
                    count = min(room, len(hidden_TD))
                    room -= count
                    parts.append(hidden_TD[:count])
                    if count < len(hidden_TD):
                        left[id(shadow)] = hidden_TD[count:]
                counts.append(count)
            self._embedding.hidden_1TD = torch.cat(parts)[None]
            self._batcher.new_tokens = counts
            self._engine.step(self._batcher)
            assert lane.hidden_TD is not None, "the lane keeps hidden states"
            for shadow, own_TD in zip(shadows, lane.hidden_TD.split(counts), strict=True):
                if len(own_TD):
                    self._last_hidden[id(shadow)] = own_TD[-1:]
                if shadow.finish is not None:
                    self._last_hidden.pop(id(shadow), None)
                    left.pop(id(shadow), None)


def _num_new_pages(shadow: Sequence, num_tokens: int) -> int:
    """Number of KV pages that the next tokens of a shadow need beside those that it has."""
    return num_pages_for(shadow.num_cached + num_tokens) - num_pages_for(shadow.num_cached)
