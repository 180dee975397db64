"""Sequences that an earlier process has begun, taken up where it left them."""

import logging
from collections.abc import Sequence as Rows

import torch

from .sequence import FinishReason, Request, Sequence, Unfinished

log = logging.getLogger(__name__)


def begun(request: Request) -> Sequence:
    """From its prompt."""
    sequence = Sequence(request=request)
    if not request.max_new_tokens:
        sequence.finish = FinishReason.length
    return sequence


def resumed(request: Request, unfinished: Unfinished | None, device: torch.device) -> Sequence:
    """From the tokens that it has; from its prompt where there are none, or where its generator is of another kind of
    device, whose draws cannot go on here."""
    if unfinished is None:
        return begun(request)
    try:
        return Sequence.restored(request, unfinished, device)
    except RuntimeError as error:
        log.warning("row %r begins again: the state of its generator does not fit %s: %s", request.id, device, error)
        return begun(request)


def resumed_lane(
    requests: Rows[Request], unfinished: Rows[Unfinished | None], device: torch.device, *, is_packed: bool
) -> list[Sequence]:
    """The sequences of one micro-batch. In a rectangle all rows have generated equally much at any time; where they
    have not, because they come out of packed lanes, such a rectangle would be wider than planned, and all of them begin
    again."""
    pairs = zip(requests, unfinished, strict=True)
    sequences = [resumed(request, state, device) for request, state in pairs]
    if is_packed or len({len(s.generated) for s in sequences if s.finish is None}) <= 1:
        return sequences
    log.warning("%d rows begin again: padded lanes cannot go on from unequally many tokens", len(sequences))
    return [begun(request) for request in requests]
