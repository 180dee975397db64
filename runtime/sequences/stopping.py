"""Stop strings: where the first one begins in the text of a completion.

They are found where transformers' `StopStringCriteria` finds them, after the same token: in what tokens spell in the
midst of a text, one behind another, special tokens by name. So a stop string may straddle tokens, name a special token,
and begin in the prompt, where the completion comes to nothing.
"""

from collections.abc import Sequence as Rows
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING

from .detokenizer import Detokenizer

if TYPE_CHECKING:
    from .sequence import Request

UNKNOWN = b"\xff"  # in the place of an id that the tokenizer lacks: in no stop string's UTF-8


class StopStrings:
    def __init__(self, detokenizer: Detokenizer):
        self._detokenizer = detokenizer

    def find(self, request: "Request", ids: Rows[int], *, begin: int = 0, num_new: int = 1) -> int | None:
        """Characters of the text of `ids[begin:]` before the first of the request's stop strings, None where none ends
        in the last token. To be asked after each token, or after `num_new`. With `begin` above 0 a stop string may not
        begin before it."""
        stops = [stop.encode(errors="surrogatepass") for stop in request.stop]
        pieces = self._last_pieces(request, ids, begin, num_new, max(map(len, stops)))
        text = b"".join(pieces)
        num_seen = len(text) - sum(map(len, pieces[len(pieces) - min(num_new, len(ids) - begin) :]))
        places = [text.find(stop, max(0, num_seen - len(stop) + 1)) for stop in stops]
        place = min((place for place in places if place >= 0), default=None)
        return None if place is None else self._num_characters(request, ids, begin, pieces, place)

    def _last_pieces(self, request: "Request", ids: Rows[int], begin: int, num_new: int, longest: int) -> list[bytes]:
        """What the last tokens spell, `num_new` of them and so many before that a stop string may begin in them."""
        known = islice(reversed(ids), len(ids) - begin)
        prompt = self._detokenizer.prompt_ids(request) if not begin and request.stops_begin_in_prompt else ()
        pieces: list[bytes] = []
        num_bytes = 0
        for token in islice(chain(known, reversed(prompt)), num_new + longest - 1):  # theirs is such a window too
            spelling = self._detokenizer.spelling(token)
            pieces.append(spelling.text if spelling.is_known else UNKNOWN)
            num_bytes += len(pieces[-1]) if len(pieces) > num_new else 0
            if len(pieces) >= num_new and num_bytes >= longest - 1:
                break
        return pieces[::-1]

    def _num_characters(self, request: "Request", ids: Rows[int], begin: int, pieces: Rows[bytes], place: int) -> int:
        """Characters of the text of `ids[begin:]` before a byte of the last `pieces`, where a character begins."""
        ends = list(accumulate(map(len, pieces)))
        index = next(index for index, end in enumerate(ends) if place < end)
        token, left = len(ids) - len(pieces) + index, pieces[index][place - ends[index] :]
        if token < begin:
            return 0
        if len(left) == len(pieces[index]) or not self._detokenizer.has_text(ids[token]):
            return len(self._detokenizer.completion(request, ids[:token], begin))
        text = self._detokenizer.completion(request, ids[: token + 1], begin)
        return max(0, len(text) - len(left.decode(errors="replace")))
