"""What all measurements of Millrace itself have in common."""

from collections.abc import Iterable, Sequence

from runtime.api import Runtime
from runtime.engine.records import PassRecord
from runtime.engine.sequence import Request


def requests_of(runtime: Runtime, prompts: Iterable[Sequence[int]]) -> list[Request]:
    """By their numbers; what the runtime rejects is left out."""
    made = [runtime.request(str(number), prompt) for number, prompt in enumerate(prompts)]
    return [request for request in made if isinstance(request, Request)]


def prefill_seconds(passes: Iterable[PassRecord]) -> float:
    """Of a pass the share that the tokens of prompts have in it."""
    return sum(p.seconds * p.counts.prompt_tokens / p.counts.real_tokens for p in passes)
