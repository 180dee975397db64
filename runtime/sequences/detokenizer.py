"""Detokenization in context, and stop strings. Alone, tokens may decode differently: SentencePiece strips the first
space of a text, and a character may span several tokens."""

import re
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from .sequence import Request

CONTEXT_TOKENS = 8  # the first tokens of a window may decode differently: a cut character, a dropped space
STATIC_PREFIX = "abcdef"  # as in transformers: context in which a token is spelled
BYTE_TOKEN = re.compile("<0x([0-9a-fA-F]{2})>")
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # byte-level vocabularies


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The bytes that a token adds within a text. `is_byte`: a byte-fallback token, which decodes with its neighbors."""

    text: bytes = b""
    is_known: bool = True
    is_byte: bool = False

    @property
    def is_whole(self) -> bool:
        """True if the token contains no partial character, whatever its neighbors."""
        if self.is_byte:
            return False
        try:
            self.text.decode()
        except UnicodeDecodeError:
            return False
        return True


class Detokenizer:
    """Decodes tokens. `start_token_id`: decoder start token, which replaces the prompt as context of completions; None
    without an encoder. Special tokens have no text, as with `skip_special_tokens`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, start_token_id: int | None = None):
        self._tokenizer, self._start_token_id = tokenizer, start_token_id
        self._spellings: dict[int, Spelling] = {}
        self._special_ids = frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)

    def decode(self, ids: Rows[int], *, keeps_special: bool = False) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=not keeps_special)
        assert isinstance(text, str), "one list of ids gives one text"
        return text

    def prompt_ids(self, request: "Request") -> tuple[int, ...]:
        """The tokens before a request's completion."""
        return request.prompt_ids if self._start_token_id is None else (self._start_token_id,)

    def completion_text(self, request: "Request", ids: Rows[int], begin: int = 0) -> str:
        """The text that `ids[begin:]` add to the prompt and the ids before them. With a grammar, no leading space is
        dropped, since the grammar counts it."""
        if request.grammar is not None:
            return self.join_spellings(ids[begin:])
        prompt = self.prompt_ids(request)
        return self.added_text([*prompt, *ids], len(prompt) + begin)

    def added_text(self, ids: Rows[int], begin: int, end: int | None = None) -> str:
        """The text of `ids[:end]` minus its common prefix with that of `ids[:begin]`, which may end in a partial
        character."""
        context = self._context(ids, begin)
        before, both = self.decode(context), self.decode([*context, *ids[begin:end]])
        return both[_num_common(before, both) :]

    def _context(self, ids: Rows[int], end: int) -> list[int]:
        """The last tokens of `ids[:end]`, enough to decode later tokens. Does not cut a run of byte tokens."""
        tail: list[int] = []
        num_tokens = CONTEXT_TOKENS
        for position in range(end - 1, -1, -1):
            token = ids[position]
            if not self.has_text(token):
                continue
            tail.append(token)
            if len(tail) >= num_tokens and not self.spelling(token).is_byte:
                if self.decode(tail[::-1]):
                    break
                num_tokens = 2 * len(tail)
        return tail[::-1]

    def has_text(self, token: int) -> bool:
        return token not in self._special_ids and self.spelling(token).is_known

    def join_spellings(self, ids: Rows[int]) -> str:
        """The text of tokens within another text: no leading space is dropped."""
        return b"".join(self.spelling(id).text for id in ids if self.has_text(id)).decode(errors="replace")

    def token_bytes(self, token: int, *, begins_text: bool = False) -> bytes:
        """The bytes that a token adds to a text, or to an empty one with `begins_text`. Special tokens by name."""
        spelling = self.spelling(token)
        if not begins_text or not spelling.is_whole or not self.has_text(token):
            return spelling.text
        return self.decode([token]).encode()

    def spelling(self, token: int) -> Spelling:
        """The bytes of a token within a text, as in transformers' `StopStringCriteria`. Special tokens by name."""
        spelling = self._spellings.get(token)
        if spelling is None:
            spelling = self._spellings[token] = self._spelling(token)
        return spelling

    def _spelling(self, token: int) -> Spelling:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # the head may have more rows than the tokenizer has tokens
            return Spelling(is_known=False)
        if self._mode == "ByteLevel" and all(character in BYTES for character in name):
            return Spelling(text=bytes(BYTES[character] for character in name))
        if self._mode == "ByteFallback" and (match := BYTE_TOKEN.fullmatch(name)):
            return Spelling(text=bytes([int(match[1], 16)]), is_byte=True)
        ids, prefix = self._prefix
        text = self._tokens_to_string([*ids, token])
        return Spelling(text=text[max(0, text.find(prefix)) + len(prefix) :].encode())

    @cached_property
    def _mode(self) -> str | None:
        """The byte encoding of the vocabulary, from the decoder's JSON state."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        state = bytes(decoder.__getstate__()) if decoder is not None else b""
        return next((kind for kind in ("ByteFallback", "ByteLevel") if f'"{kind}"'.encode() in state), None)

    @cached_property
    def _prefix(self) -> tuple[list[int], str]:
        """Context in which a token is spelled: transformers' own, or the first token with text if the tokenizer cannot
        encode that."""
        ids = list(self._tokenizer(STATIC_PREFIX, add_special_tokens=False)["input_ids"])
        if STATIC_PREFIX in self._tokens_to_string(ids):
            return ids, STATIC_PREFIX
        known = sorted({*self._tokenizer.get_vocab().values()} - self._special_ids)
        texts = ((id, self._tokens_to_string([id])) for id in known)
        return next((([id], text) for id, text in texts if text.isalnum()), ([], ""))

    def _tokens_to_string(self, ids: list[int]) -> str:
        """Text of the tokens, special tokens by name."""
        names = (self._tokenizer.convert_ids_to_tokens(id) for id in ids)
        return self._tokenizer.convert_tokens_to_string([name for name in names if isinstance(name, str)])

    def offsets(self, ids: Rows[int], *, begins_text: bool) -> list[int]:
        """Character offset of each token in the text of `ids`. `begins_text`: `ids` start a text."""
        context = [] if begins_text else self._prefix[0]
        known, offsets, num_characters = [*context, *ids], list[int](), 0
        first = len(context)
        starts = [i for i in range(first, len(known)) if i == first or self._is_stable_boundary(known[i])]
        for start, end in pairwise([*starts, len(known)]):
            text = self.added_text(known, start, end)
            parts = (self.added_text(known, start, position) for position in range(start + 1, end))
            stable_lengths = accumulate((_num_common(text, part) for part in parts), max, initial=0)
            offsets += [num_characters + length for length in stable_lengths]
            num_characters += len(text)
        return offsets

    def _is_stable_boundary(self, token: int) -> bool:
        """True if the text before this token can no longer change."""
        spelling = self.spelling(token)
        return spelling.is_whole and bool(spelling.text) and self.has_text(token)


def _num_common(first: str, second: str) -> int:
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


UNKNOWN = b"\xff"  # replaces ids that the tokenizer lacks; in no UTF-8 stop string


class StopStrings:
    """Finds stop strings at the same token as transformers' `StopStringCriteria`: in the concatenated spellings of
    tokens. So a stop string may span tokens, name a special token, or begin in the prompt (an empty completion)."""

    def __init__(self, detokenizer: Detokenizer):
        self._detokenizer = detokenizer

    def find(self, request: "Request", ids: Rows[int], *, begin: int = 0, num_new: int = 1) -> int | None:
        """Length of the text of `ids[begin:]` before the first stop string; None if none ends in the last token. Call
        it after each token, or after `num_new`. If `begin` is above 0, stop strings before it do not count."""
        stops = [stop.encode(errors="surrogatepass") for stop in request.stop]
        longest, generated = max(map(len, stops)), islice(reversed(ids), len(ids) - begin)
        prompt = self._detokenizer.prompt_ids(request) if not begin and request.stops_begin_in_prompt else ()
        pieces: list[bytes] = []  # spellings of the new tokens and of the context that a stop string may begin in
        num_bytes = 0
        for token in islice(chain(generated, reversed(prompt)), num_new + longest - 1):  # as transformers does
            spelling = self._detokenizer.spelling(token)
            pieces.append(spelling.text if spelling.is_known else UNKNOWN)
            num_bytes += len(pieces[-1]) if len(pieces) > num_new else 0
            if len(pieces) >= num_new and num_bytes >= longest - 1:
                break
        pieces.reverse()
        text = b"".join(pieces)
        num_old_bytes = len(text) - sum(map(len, pieces[len(pieces) - min(num_new, len(ids) - begin) :]))
        matches = [text.find(stop, max(0, num_old_bytes - len(stop) + 1)) for stop in stops]
        match = min((offset for offset in matches if offset >= 0), default=None)
        if match is None:
            return None
        ends = list(accumulate(map(len, pieces)))
        index = next(index for index, end in enumerate(ends) if match < end)
        token, cut_bytes = len(ids) - len(pieces) + index, pieces[index][match - ends[index] :]
        if token < begin:
            return 0
        if len(cut_bytes) == len(pieces[index]) or not self._detokenizer.has_text(ids[token]):
            return len(self._detokenizer.completion_text(request, ids[:token], begin))
        text = self._detokenizer.completion_text(request, ids[: token + 1], begin)
        return max(0, len(text) - len(cut_bytes.decode(errors="replace")))
