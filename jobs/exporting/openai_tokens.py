"""Log-probabilities of a row's tokens in OpenAI's two forms, with the text and the bytes that each token adds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from runtime.config.settings import ModelConfig
from runtime.errors import ConfigError
from runtime.origin.location import find_tokenizer
from runtime.sequences.detokenizer import Detokenizer

LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON lacks

JsonObject: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Token:
    """`data`: the bytes that it adds to the text before it."""

    id: int
    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        """A part of a character is `bytes:` and its bytes, as OpenAI writes it."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)

    @property
    def as_json(self) -> JsonObject:
        return {"token": self.text, "bytes": list(self.data), "logprob": self.logprob}


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Makes log-probabilities of rows; the tokenizer of `model` is loaded with the first."""

    model: ModelConfig
    cache_dir: str | None

    def chat_logprobs(self, row: Mapping[str, Any], num_top: int) -> JsonObject:
        content = [
            {**chosen.as_json, "top_logprobs": [each.as_json for each in likeliest[:num_top]]}
            for chosen, likeliest in self._tokens(row)
        ]
        return {"content": content, "refusal": None}

    def completion_logprobs(self, row: Mapping[str, Any], num_top: int) -> JsonObject:
        tokens = list(self._tokens(row))
        return {
            "tokens": [chosen.text for chosen, _ in tokens],
            "token_logprobs": [chosen.logprob for chosen, _ in tokens],
            "top_logprobs": [_by_text(chosen, likeliest[:num_top]) for chosen, likeliest in tokens],
            "text_offset": self._detokenizer.offsets(row["token_ids"], begins_text=self._begins_text(row)),
        }

    def _tokens(self, row: Mapping[str, Any]) -> Iterator[tuple[Token, Sequence[Token]]]:
        """Each generated token, and the likeliest ones in its place, likeliest first."""
        begins_text = self._begins_text(row)

        def token(id: int, logprob: float) -> Token:
            data = self._detokenizer.token_bytes(id, begins_text=begins_text)
            return Token(id=id, data=data, logprob=max(logprob, LEAST_LOGPROB))

        columns = (row["token_ids"], row["logprobs"], row["top_token_ids"], row["top_logprobs"])
        for id, own, top_ids, top in zip(*columns, strict=True):
            yield token(id, own), list(map(token, top_ids, top))
            begins_text = begins_text and not self._detokenizer.has_text(id)

    def _begins_text(self, row: Mapping[str, Any]) -> bool:
        """Whether a text began with the completion, so that a first space was dropped. A row does not say what stood
        before it."""
        ids, text = row["token_ids"], row["completion"]
        return not self._detokenizer.spelled(ids).startswith(text) and self._detokenizer.decode(ids).startswith(text)

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        tokenizer = find_tokenizer(self.model, self.cache_dir)
        if tokenizer is None:
            raise ConfigError("log-probabilities in OpenAI's form have texts of tokens: set model.tokenizer")
        return Detokenizer(tokenizer)


def _by_text(chosen: Token, likeliest: Sequence[Token]) -> dict[str, float]:
    """The log-probability of each by its text. Of several with one text the chosen one has it, else the likeliest, and
    the others are `token_id:` and their id, as vLLM writes it."""
    owner_of = {chosen.text: chosen.id}
    for each in likeliest:
        owner_of.setdefault(each.text, each.id)
    return {each.text if owner_of[each.text] == each.id else f"token_id:{each.id}": each.logprob for each in likeliest}
