"""Rows that are tokenised together come to what each comes to alone, in their order."""

from dataclasses import replace

import pytest

from jobs.datasets import Row, row_digest_bytes
from jobs.run import requests
from jobs.run.requests import completion_requests, make_batch
from runtime import Runtime, RuntimeConfig
from runtime.requests.prompts import Rejected
from runtime.sequences.sequence import Request

PROMPTS = ["one", "two words", "déjà vu", None, "x" * 3000, "a last one that is longer than the others"]


def row(index: int, prompt: str | None) -> Row:
    error = None if prompt is not None else "somewhere: not JSON"
    return Row(index=index, id=f"r{index}", prompt=prompt or "", messages=None, columns={}, error=error)


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_rows_ask_what_each_asks_alone_however_many_are_tokenised_at_once(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "CHUNK_ROWS", rows_at_once)
    runtime = Runtime(RuntimeConfig())
    rows = [row(index, prompt) for index, prompt in enumerate(PROMPTS)]
    asked = make_batch(runtime, rows, completion_requests)
    alone = [runtime.request(each.id, each.prompt) for each in rows if each.error is None]
    assert list(asked.requests) == [each for each in alone if isinstance(each, Request)]
    assert [each.id for each in asked.request_rows] == [each.id for each in asked.requests]
    refused = [Rejected(id="r3", error="somewhere: not JSON"), *(e for e in alone if isinstance(e, Rejected))]
    assert list(asked.rejected) == refused
    assert [each.id for each in asked.rejected_rows] == ["r3", "r4"]


def test_a_prompt_that_comes_as_tokens_is_asked_as_it_is_and_is_another_row_than_its_text() -> None:
    runtime = Runtime(RuntimeConfig())
    ids = runtime.tokenize(["two words"])[0][1:]
    given = replace(row(1, ""), error=None, prompt_ids=ids)
    asked = make_batch(
        runtime, [row(0, "one"), given, replace(given, index=2, id="r2", prompt_ids=())], completion_requests
    )
    assert [each.prompt_ids for each in asked.requests] == [runtime.tokenize(["one"])[0], ids]
    assert [each.error for each in asked.rejected] == ["the prompt has no tokens"]
    assert len({row_digest_bytes(each) for each in (row(1, ""), given, replace(given, prompt_ids=ids[1:]))}) == 3
