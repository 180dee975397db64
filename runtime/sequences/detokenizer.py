"""Detokenization with context, and stop strings.

Tokens may decode differently without the tokens before them: SentencePiece strips the first space of a text, and a
character may consist of several tokens. So text is decoded after some context, and the context's text is removed. The
spelling of a token is the bytes that it adds within a text."""

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

CONTEXT_TOKENS = 8  # number of tokens before a text that are decoded with it
STATIC_PREFIX = "abcdef"  # context for finding the spelling of a token, as in transformers
BYTE_TOKEN = re.compile("<0x([0-9a-fA-F]{2})>")
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level vocabularies


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The bytes that a token adds within a text. `is_known`: the tokenizer has the token. `is_byte`: a byte-fallback
    token, which is decoded together with its neighbors."""

    text: bytes = b""
    is_known: bool = True
    is_byte: bool = False

    @property
    def is_whole(self) -> bool:
        """True if the token consists of whole characters."""
        if self.is_byte:
            return False
        try:
            self.text.decode()
        except UnicodeDecodeError:
            return False
        return True


class Detokenizer:
    """Decodes tokens. Special tokens have no text, as with `skip_special_tokens`. `start_token_id`: the decoder start
    token of an encoder-decoder, which is the context of completions instead of the prompt; None without an encoder."""

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
        """The text that `ids[begin:]` add after the prompt and `ids[:begin]`. With a grammar, the text keeps its
        leading space, since the grammar counts it."""
        if request.grammar is not None:
            return self.join_spellings(ids[begin:])
        prompt = self.prompt_ids(request)
        return self.added_text([*prompt, *ids], len(prompt) + begin)

    def added_text(self, ids: Rows[int], begin: int, end: int | None = None) -> str:
        """The text that `ids[begin:end]` add after `ids[:begin]`: the text of `ids[:end]` without its common prefix
        with the text of `ids[:begin]`. If `ids[:begin]` ends in a partial character, the result begins with the whole
        character."""
        context = self._context(ids, begin)
        before, both = self.decode(context), self.decode([*context, *ids[begin:end]])
        return both[_num_common(before, both) :]

    def _context(self, ids: Rows[int], end: int) -> list[int]:
        """The last tokens of `ids[:end]`, as context to decode later tokens. Consecutive byte tokens are not cut."""
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
                num_tokens = 2 * len(tail)  # without text it is no context: take more tokens
        return tail[::-1]

    def has_text(self, token: int) -> bool:
        return token not in self._special_ids and self.spelling(token).is_known

    def join_spellings(self, ids: Rows[int]) -> str:
        """The text of tokens within a longer text, with its leading space."""
        return b"".join(self.spelling(id).text for id in ids if self.has_text(id)).decode(errors="replace")

    def token_bytes(self, token: int, *, begins_text: bool = False) -> bytes:
        """The bytes that a token adds within a text, or at its beginning if `begins_text`. A special token gives its
        name."""
        spelling = self.spelling(token)
        if not begins_text or not spelling.is_whole or not self.has_text(token):
            return spelling.text
        return self.decode([token]).encode()

    def spelling(self, token: int) -> Spelling:
        """The bytes that a token adds within a text, as in transformers' `StopStringCriteria`. A special token gives
        its name."""
        spelling = self._spellings.get(token)
        if spelling is None:
            spelling = self._spellings[token] = self._spelling(token)
        return spelling

    def _spelling(self, token: int) -> Spelling:
        """Finds a spelling: from the token's name if this encodes bytes, else from the text after a known prefix."""
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
        """How the vocabulary encodes bytes: "ByteFallback" (tokens such as <0x0A>), "ByteLevel" (a character per byte),
        or None. Found in the JSON state of the tokenizer's decoder."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        state = bytes(decoder.__getstate__()) if decoder is not None else b""
        return next((kind for kind in ("ByteFallback", "ByteLevel") if f'"{kind}"'.encode() in state), None)

    @cached_property
    def _prefix(self) -> tuple[list[int], str]:
        """Token ids and text of the context for finding spellings: that of transformers, or the first alphanumeric
        token if the tokenizer cannot encode it."""
        ids = list(self._tokenizer(STATIC_PREFIX, add_special_tokens=False)["input_ids"])
        if STATIC_PREFIX in self._tokens_to_string(ids):
            return ids, STATIC_PREFIX
        known = sorted({*self._tokenizer.get_vocab().values()} - self._special_ids)
        texts = ((id, self._tokens_to_string([id])) for id in known)
        return next((([id], text) for id, text in texts if text.isalnum()), ([], ""))

    def _tokens_to_string(self, ids: list[int]) -> str:
        """The text of the tokens; a special token gives its name."""
        names = (self._tokenizer.convert_ids_to_tokens(id) for id in ids)
        return self._tokenizer.convert_tokens_to_string([name for name in names if isinstance(name, str)])

    def offsets(self, ids: Rows[int], *, begins_text: bool) -> list[int]:
        """The character offset of each token in the text of `ids`. `begins_text`: `ids` are the beginning of a text."""
        context = [] if begins_text else self._prefix[0]
        all_ids, offsets, num_characters = [*context, *ids], list[int](), 0
        first = len(context)
        # Divide the tokens at stable boundaries. Within a part, decode the first token, the first two, and so on. Such
        # a text may end in an incomplete character: the next token's offset is the length that equals the part's text.
        starts = [i for i in range(first, len(all_ids)) if i == first or self._is_stable_boundary(all_ids[i])]
        for start, end in pairwise([*starts, len(all_ids)]):
            text = self.added_text(all_ids, start, end)
            parts = (self.added_text(all_ids, start, position) for position in range(start + 1, end))
            stable_lengths = accumulate((_num_common(text, part) for part in parts), max, initial=0)
            offsets += [num_characters + length for length in stable_lengths]
            num_characters += len(text)
        return offsets

    def _is_stable_boundary(self, token: int) -> bool:
        """True if this token and later ones do not change the text before it."""
        spelling = self.spelling(token)
        return spelling.is_whole and bool(spelling.text) and self.has_text(token)


def _num_common(first: str, second: str) -> int:
    """Length of the common prefix."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


UNKNOWN = b"\xff"  # spelling of ids that the tokenizer lacks; not part of any UTF-8 stop string


class StopStrings:
    """Finds stop strings in the concatenated spellings of tokens, and so at the same token as transformers'
    `StopStringCriteria`. A stop string may span several tokens, contain the name of a special token, or begin in the
    prompt (the completion is then empty)."""

    def __init__(self, detokenizer: Detokenizer):
        self._detokenizer = detokenizer

    def find(self, request: "Request", ids: Rows[int], *, begin: int = 0, num_new: int = 1) -> int | None:
        """Length of the text of `ids[begin:]` before the first stop string. None if no stop string ends in the last
        `num_new` tokens, those since the previous call. If `begin` is above 0, stop strings begin at `begin` or
        later."""
        stops = [stop.encode(errors="surrogatepass") for stop in request.stop]
        longest, generated = max(map(len, stops)), islice(reversed(ids), len(ids) - begin)
        prompt = self._detokenizer.prompt_ids(request) if not begin and request.stops_begin_in_prompt else ()
        # Collect, backwards, the spellings of the new tokens, and of tokens before them in which a stop string that
        # ends in a new token may begin. Like transformers, take at most `longest - 1` tokens before the new ones.
        spellings: list[bytes] = []
        num_bytes = 0
        for token in islice(chain(generated, reversed(prompt)), num_new + longest - 1):
            spelling = self._detokenizer.spelling(token)
            spellings.append(spelling.text if spelling.is_known else UNKNOWN)
            num_bytes += len(spellings[-1]) if len(spellings) > num_new else 0
            if len(spellings) >= num_new and num_bytes >= longest - 1:
                break
        spellings.reverse()
        text = b"".join(spellings)
        num_old_bytes = len(text) - sum(map(len, spellings[len(spellings) - min(num_new, len(ids) - begin) :]))
        matches = [text.find(stop, max(0, num_old_bytes - len(stop) + 1)) for stop in stops]
        match = min((offset for offset in matches if offset >= 0), default=None)
        if match is None:
            return None
        # The stop string begins in the token `ids[position]`, whose last bytes `cut_bytes` belong to it.
        ends = list(accumulate(map(len, spellings)))
        index = next(index for index, end in enumerate(ends) if match < end)
        position, cut_bytes = len(ids) - len(spellings) + index, spellings[index][match - ends[index] :]
        if position < begin:
            return 0
        if len(cut_bytes) == len(spellings[index]) or not self._detokenizer.has_text(ids[position]):
            return len(self._detokenizer.completion_text(request, ids[:position], begin))
        text = self._detokenizer.completion_text(request, ids[: position + 1], begin)
        return max(0, len(text) - len(cut_bytes.decode(errors="replace")))
