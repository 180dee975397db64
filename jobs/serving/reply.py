"""Responses to single requests in the form of OpenAI's API: one JSON object, or server-sent events."""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from ..datasets.openai_body import CHAT_URL
from .answers import AnswerError

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The response to one request. `model`: as named by the client."""

    url: str
    model: str
    id: str = field(default_factory=lambda: token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def _is_chat(self) -> bool:
        return self.url == CHAT_URL

    def whole(self, response: Json) -> Json:
        return {**self._head("chat.completion" if self._is_chat else "text_completion"), **response}

    async def events(self, first: Json, messages: AsyncGenerator[Json], *, has_usage: bool) -> AsyncIterator[str]:
        """Yields the events of a request whose `first` message has arrived. An error after it is an event, too."""
        begun = set[int]()
        async with aclosing(messages):
            message = first
            try:
                while "response" not in message:
                    for chunk in self._chunks(message["index"], message["text"], begun):
                        yield _event(chunk)
                    message = await anext(messages)
            except AnswerError as error:
                kind = "server_error" if error.status >= 500 else "invalid_request_error"
                yield _event({"error": {"message": str(error), "type": kind, "param": None, "code": None}})
                return
            for choice in message["response"]["choices"]:
                for chunk in self._chunks(choice["index"], choice["rest"], begun):
                    yield _event(chunk)
                yield _event(self._chunk(choice["index"], {}, choice["finish_reason"]))
            if has_usage:
                head = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
                yield _event({**head, "choices": [], "usage": message["response"]["usage"]})
            yield "data: [DONE]\n\n"

    def _chunks(self, index: int, text: str, begun: set[int]) -> list[Json]:
        """Chunks with more text of a choice; the first one of a chat has the role."""
        chunks = []
        if index not in begun and self._is_chat:
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}, None))
        begun.add(index)
        if text:
            chunks.append(self._chunk(index, {"content": text}, None))
        return chunks

    def _chunk(self, index: int, delta: Json, finish_reason: str | None) -> Json:
        if self._is_chat:
            choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            return {**self._head("chat.completion.chunk"), "choices": [choice]}
        choice = {"index": index, "text": delta.get("content", ""), "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("text_completion"), "choices": [choice]}

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


def _event(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"
