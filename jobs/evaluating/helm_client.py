"""HELM client (subclass of crfm-helm's `helm.clients.client.Client`) that answers from a finished run.

It runs in HELM's process and must not import torch or transformers.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from helm.clients.client import Client  # pyright: ignore[reportMissingImports]
from helm.common.request import (  # pyright: ignore[reportMissingImports]
    ErrorFlags,
    GeneratedOutput,
    Request,
    RequestResult,
    Token,
)

from ..datasets.helm import request_digest

COLUMNS = ("id", "sample_index", "completion", "token_ids", "logprobs", "finish_reason", "error")
FATAL = ErrorFlags(is_retriable=False, is_fatal=True)


class RunClient(Client):
    """Answers requests from a finished run of `weightstream generate dataset=helm`. `run`: its directory, or a glob for
    its shards, `outputs/generate/mine-*`."""

    def __init__(self, run: str, **kwargs: object):
        self._run = run
        self._rows = dict(_read_rows_by_id(run))

    def make_request(self, request: Request) -> RequestResult:
        """Returns the completions of a request, for any model name. A missing or failed request is a fatal error."""
        rows = self._rows.get(request_digest(asdict(request)))
        if rows is None:
            return _error_result(f"{self._run} has no such request: is it a run of this suite's dry run?")
        errors = [row["error"] for row in rows if row["error"] is not None]
        if errors:
            return _error_result(f"{self._run}: {errors[0]}")
        completions: list[GeneratedOutput] = []
        for row in rows:
            logprobs = row["logprobs"]
            # one token per generated token; runs store no token texts, so the first one carries the whole completion
            texts = [row["completion"], *("" for _ in logprobs[1:])]
            tokens = [
                Token(text=text, logprob=logprob) for text, logprob in zip(texts, logprobs, strict=bool(logprobs))
            ]
            reason = {"reason": "length" if row["finish_reason"] == "length" else "stop"}
            completions.append(
                GeneratedOutput(text=row["completion"], logprob=sum(logprobs), tokens=tokens, finish_reason=reason)
            )
        return RequestResult(success=True, embedding=[], completions=completions, cached=True, request_time=0.0)


def _error_result(error: str) -> RequestResult:
    return RequestResult(success=False, embedding=[], completions=[], cached=False, error=error, error_flags=FATAL)


def _read_rows_by_id(run: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields each request's rows, sorted by sample. Raises ValueError if the run does not exist or is unfinished."""
    path = Path(run)
    directories = sorted(path.parent.glob(path.name))
    if not directories:
        raise ValueError(f"run={run} does not exist")
    for directory in directories:
        if not (directory / "_SUCCESS.json").exists():
            raise ValueError(f"run={directory} is not finished: start its command again")
        table = pq.read_table(directory / "generations", columns=list(COLUMNS))
        rows_by_id: dict[str, list[dict[str, Any]]] = {}
        for row in table.sort_by([("id", "ascending"), ("sample_index", "ascending")]).to_pylist():
            rows_by_id.setdefault(row["id"], []).append(row)
        yield from rows_by_id.items()
