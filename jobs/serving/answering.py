"""The process that answers single requests with one open model, in continuous batches.

Started by the server. Reads JSON objects from stdin, one per line: first the settings of `jobs.generate` and the
capacity, then requests (`id`, `url`, `body`, `streams`) and `{"cancel": id}`; the end of stdin ends it. Writes JSON
objects to stdout: `{"ready": ...}` once, then for a request `{"id", "index", "text"}` while it generates (`streams`),
and `{"id", "response"}` or `{"id", "error"}` at its end. After each pass it writes `{"pass": ...}`.
"""

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

if __name__ == "__main__":
    from jobs.config.process import restart_tuned

    restart_tuned()  # before the imports that take long

from jobs.config.cli import print_error
from jobs.config.error_log import log_errors
from jobs.config.logs import setup_logging
from jobs.config.settings import GenerateConfig
from jobs.config.typed import build
from jobs.datasets.kinds.openai_batch import with_request
from jobs.datasets.openai_body import CHAT_URL
from jobs.datasets.records import BadRecord, Fields
from jobs.datasets.rows import Row
from jobs.exporting.openai_batch import LogprobFormatter, completion_usage, make_choice
from jobs.run.requests import (
    RequestBatch,
    completed_rows,
    completion_requests,
    has_template,
    make_batch,
    make_renderer,
)
from runtime.config.settings import Admission, SharePrefixes
from runtime.engine.records import PassRecord
from runtime.engine.session import Arrivals, Session
from runtime.errors import ConfigError, Interrupted, WeightstreamError
from runtime.library.api import Runtime
from runtime.sequences.sequence import Completion, Request
from runtime.stream.device import ComputeDevice

Json = dict[str, Any]
MAX_PROMPTS = 2048  # of one request, with all of their samples


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Limits of the open model. `num_rows`: completions that are generated at the same time; `num_tokens`: prompt and
    new tokens of one; `gather_seconds`: how long an idle model waits for more requests after the first."""

    num_rows: int
    num_tokens: int
    gather_seconds: float


class Inbox:
    """Messages from stdin, read by a thread."""

    def __init__(self, lines: Any):
        self._condition, self._messages, self._is_closed = threading.Condition(), deque[Json](), False
        threading.Thread(target=self._read, args=(lines,), name="inbox", daemon=True).start()

    def _read(self, lines: Any) -> None:
        for line in lines:
            with self._condition:
                self._messages.append(json.loads(line))
                self._condition.notify()
        with self._condition:
            self._is_closed = True
            self._condition.notify()

    def take(self, *, waits: bool, gather_seconds: float, max_messages: int) -> list[Json] | None:
        """All messages so far; None after the end of the input. `waits`: until there is one, and then for
        `gather_seconds` or `max_messages` for more."""
        with self._condition:
            if waits:
                self._condition.wait_for(lambda: self._messages or self._is_closed)
                end = time.monotonic() + gather_seconds
                while not self._is_closed and len(self._messages) < max_messages:
                    if not self._condition.wait(max(0.0, end - time.monotonic())):
                        break
            if self._is_closed:
                return None
            messages = [*self._messages]
            self._messages.clear()
            return messages


@dataclass(kw_only=True)
class _Answer:
    """A request in progress. `rows`: its prompts; `requests`: the completions to generate, with the position of their
    prompt; `choices`: finished ones by number; `sent`: text already sent of each."""

    id: str
    url: str
    body: Fields
    streams: bool
    rows: Sequence[Row]
    requests: Sequence[tuple[int, Request]]
    choices: dict[int, Json] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)
    num_new_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum({position: len(request.prompt_ids) for position, request in self.requests}.values())

    @property
    def max_stop_characters(self) -> int:
        """Characters at the end of a text that may turn out to begin a stop string."""
        return max((len(stop) for _, request in self.requests for stop in request.stop), default=1) - 1


class AnswerLoop:
    """Turns messages into requests of a session, and its completions into messages."""

    def __init__(self, config: GenerateConfig, runtime: Runtime, capacity: Capacity, inbox: Inbox, write: Any):
        self._config, self._runtime, self._capacity, self._inbox, self._write = config, runtime, capacity, inbox, write
        tokenizer = runtime.model.tokenizer
        self._renderer = make_renderer(tokenizer) if tokenizer is not None and has_template(tokenizer) else None
        self._formatter = LogprobFormatter(model=config.model, cache_dir=config.offload.cache_dir)
        self._answers: dict[str, _Answer] = {}
        self._numbers: dict[int, tuple[_Answer, int]] = {}  # answer and choice of each request in the session
        self._next_number = 0

    def run(self, session: Session) -> None:
        """Answers until stdin ends."""

        def on_pass(record: PassRecord) -> None:
            for number, (answer, index) in self._numbers.items():
                if answer.streams:
                    self._send_text(answer, index, session.text_so_far(number))
            counts = record.counts
            self._write({"pass": {"rows": counts.num_sequences, "tokens": counts.useful_tokens, "s": record.seconds}})

        with self._renderer or nullcontext():
            for number, completion in session.live(self._arrive, on_pass):
                self._finish(number, completion)

    def _arrive(self, is_idle: bool) -> Arrivals | None:
        messages = self._inbox.take(
            waits=is_idle, gather_seconds=self._capacity.gather_seconds, max_messages=self._capacity.num_rows
        )
        if messages is None:
            return None
        new, cancelled = dict[int, Request](), list[int]()
        for message in messages:
            if "cancel" in message:
                if (answer := self._answers.pop(message["cancel"], None)) is not None:
                    cancelled += [number for number, (other, _) in self._numbers.items() if other is answer]
                continue
            try:
                answer = self._parse(message)
            except (BadRecord, ConfigError) as error:
                self._write({"id": message["id"], "error": {"status": 400, "message": str(error)}})
                continue
            self._answers[answer.id] = answer
            for index, (_, request) in enumerate(answer.requests):
                self._numbers[self._next_number] = answer, index
                new[self._next_number] = request
                self._next_number += 1
        for number in cancelled:
            del self._numbers[number]
            new.pop(number, None)
        return Arrivals(new, cancelled)

    def _parse(self, message: Json) -> _Answer:
        """Raises BadRecord or ConfigError with the field to change."""
        body = {key: value for key, value in message["body"].items() if key not in ("stream", "stream_options")}
        prompts = split_prompts(body) if message["url"] != CHAT_URL else [body]
        rows: list[Row] = []
        for position, prompt in enumerate(prompts):
            row = Row(
                index=position, id=f"{message['id']}-{position}", prompt="", messages=None, columns={}, error=None
            )
            rows.append(with_request(row, message["url"], prompt, self._config.dataset))
        max_logprobs = self._runtime.config.sampling.logprobs
        if (num_logprobs := max(row.overrides.logprobs or 0 for row in rows)) > max_logprobs:
            raise BadRecord(
                f"body.logprobs: the server has sampling.logprobs={max_logprobs}; start it with "
                f"sampling.logprobs={num_logprobs}"
            )
        num_samples = sum(row.overrides.n or self._runtime.config.sampling.n for row in rows)
        if num_samples > MAX_PROMPTS:
            raise BadRecord(f"the request asks for {num_samples:,} completions; the limit is {MAX_PROMPTS:,}")
        batch = make_batch(self._runtime, rows, completion_requests, self._renderer)
        if batch.rejected:
            raise BadRecord(batch.rejected[0].error)
        limit = self._capacity.num_tokens
        for request in batch.requests:
            if len(request.prompt_ids) + request.max_new_tokens > limit:
                raise BadRecord(
                    f"the prompt has {len(request.prompt_ids):,} tokens, and max_tokens is {request.max_new_tokens:,}: "
                    f"together above the server's max_request_tokens={limit:,}"
                )
        pairs = zip(batch.request_rows, batch.requests, strict=True)
        return _Answer(
            id=message["id"],
            url=message["url"],
            body=body,
            streams=bool(message.get("streams")),
            rows=rows,
            requests=[(row.index, request) for row, request in pairs],
        )

    def _send_text(self, answer: _Answer, index: int, text: str | None) -> None:
        """Sends what is new and certain: not a partial character, nor what may begin a stop string."""
        if text is None:
            return
        text = text[: max(0, len(text) - answer.max_stop_characters)].rstrip("\ufffd")
        sent = answer.sent.get(index, "")
        if len(text) > len(sent) and text.startswith(sent):
            answer.sent[index] = text
            self._write({"id": answer.id, "index": index, "text": text[len(sent) :]})

    def _finish(self, number: int, completion: Completion) -> None:
        answer, index = self._numbers.pop(number)
        position, request = answer.requests[index]
        if completion.error is not None:
            self._answers.pop(answer.id, None)
            self._write({"id": answer.id, "error": {"status": 500, "message": completion.error}})
            return
        if answer.id not in self._answers:
            return  # another of its completions failed
        batch = RequestBatch(requests=[request], request_rows=[answer.rows[position]], rejected=[], rejected_rows=[])
        [row] = completed_rows(batch, 0, completion)
        is_chat = answer.url == CHAT_URL
        choice = make_choice(vars(row), answer.body, self._formatter, is_chat=is_chat)
        if answer.streams:
            text = choice["message"]["content"] if is_chat else choice["text"]
            sent = answer.sent.get(index, "")
            choice["rest"] = text[len(sent) :]
        answer.choices[index] = {**choice, "index": index}
        answer.num_new_tokens += len(completion.token_ids)
        if len(answer.choices) == len(answer.requests):
            del self._answers[answer.id]
            usage = completion_usage(answer.num_prompt_tokens, answer.num_new_tokens)
            choices = [answer.choices[index] for index in sorted(answer.choices)]
            self._write({"id": answer.id, "response": {"choices": choices, "usage": usage}})


def split_prompts(body: Fields) -> list[Fields]:
    """One body for each prompt of a completion request, which may have several."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt):
        return [{**body, "prompt": item} for item in prompt]
    return [body]


def open_and_answer(config: GenerateConfig, capacity: Capacity, inbox: Inbox, write: Callable[[Json], None]) -> None:
    """Plans for full lanes of the longest requests, opens the model and answers until stdin ends."""
    policy = replace(config.policy, admission=Admission.continuous, share_prefixes=SharePrefixes.off)
    config = replace(config, policy=policy)
    runtime = Runtime(config.runtime, device=ComputeDevice(config.machine.device))
    num_tokens = min(capacity.num_tokens, runtime.model.shape.context_tokens or capacity.num_tokens)
    capacity = replace(capacity, num_tokens=num_tokens)
    num_prompt = max(1, num_tokens // 2)
    longest = [
        Request(id=str(number), prompt_ids=(0,) * num_prompt, max_new_tokens=num_tokens - num_prompt)
        for number in range(capacity.num_rows)
    ]
    with runtime.open_with_backoff(longest) as (plan, session):
        num_rows = min(capacity.num_rows, plan.num_lanes * plan.lane_size)
        capacity = replace(capacity, num_rows=num_rows)
        write({"ready": {"rows": num_rows, "tokens": num_tokens}})
        AnswerLoop(config, runtime, capacity, inbox, write).run(session)


def main() -> int:
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the messages

    def write(message: Json) -> None:
        try:
            output.write(json.dumps(message) + "\n")
            output.flush()
        except OSError as error:
            raise Interrupted("the server has ended") from error

    try:
        with log_errors():
            values = json.loads(sys.stdin.readline() or "{}")
            config, capacity = build(GenerateConfig, values["config"]), build(Capacity, values["capacity"])
            setup_logging(config.log_level)
            open_and_answer(config, capacity, Inbox(sys.stdin), write)
    except WeightstreamError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
