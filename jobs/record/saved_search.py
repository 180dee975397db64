"""The state of a beam search as JSON, for the checkpoint of a run. It stands alone as a format of its own, which is as
strict as the checkpoint that holds it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from runtime.sequences.beams import BeamState, Hypothesis
from runtime.sequences.sequence import BeamWay, FinishReason, TokenLogprobs


def written_search(state: BeamState[BeamWay] | None) -> bytes | None:
    """JSON that `read_search` reads."""
    return None if state is None else json.dumps(asdict(state), default=lambda reason: reason.value).encode()


def read_search(data: bytes | None) -> BeamState[BeamWay] | None:
    """The inverse of `written_search`. Raises ValueError, KeyError or TypeError where `data` is something else."""
    if data is None:
        return None
    values = json.loads(data)
    hypotheses = (Hypothesis(score=each["score"], way=_read_way(each["way"])) for each in values["hypotheses"])
    return BeamState(scores=tuple(values["scores"]), hypotheses=tuple(hypotheses))


def _read_way(values: Mapping[str, Any] | None) -> BeamWay | None:
    if values is None:
        return None
    logprobs = (
        TokenLogprobs(own=each["own"], top_ids=tuple(each["top_ids"]), top=tuple(each["top"]))
        for each in values["logprobs"]
    )
    return BeamWay(
        token_ids=tuple(values["token_ids"]),
        finish=FinishReason(values["finish"]),
        text_end=values["text_end"],
        logprobs=tuple(logprobs),
    )
