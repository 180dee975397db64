"""Requests for scores of given tokens: made of a prompt and a target, joined where one forward pass serves several, and
their scores taken apart again.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from ..model.loading import LoadedModel
from ..sequences.sequence import Completion, Request, Scoring, TokenScore
from .prompts import Rejected, outside_vocabulary


def make_scoring(
    model: LoadedModel, id: str, prompt_ids: Rows[int], target_ids: Rows[int], *, index: int = 0
) -> Request | Rejected:
    """The request for scores of `target_ids` behind the prompt, whose sample index is `index`. Only what the target's
    last token follows on is computed, which must find room in the model's context."""
    num_prompt, (*known, last) = len(prompt_ids), target_ids or (-1,)
    has_encoder = model.start_token_id is not None
    ids = tuple(prompt_ids) if has_encoder else (*prompt_ids, *known)
    error = _problem(model, prompt_ids, target_ids, num_tokens=len(ids))
    if error is not None:
        return Rejected(id=id, error=error, num_prompt_tokens=num_prompt, sample_index=index)
    scoring = Scoring(
        num_positions=len(target_ids), last_ids=(last,), decoder_ids=tuple(known) if has_encoder else None
    )
    return Request(id=id, prompt_ids=ids, max_new_tokens=1, sample_index=index, scoring=scoring)


def _problem(model: LoadedModel, prompt_ids: Rows[int], target_ids: Rows[int], *, num_tokens: int) -> str | None:
    if not prompt_ids:
        return "the prompt has no tokens, and the first of the target follows on nothing"
    if not target_ids:
        return "the target has no tokens"
    most = model.shape.context_tokens
    if model.start_token_id is not None:
        if max(len(prompt_ids), len(target_ids)) > most:
            sizes = f"the prompt has {len(prompt_ids):,} tokens and the target {len(target_ids):,}"
            return f"{sizes}; the model's encoder and decoder have room for {most:,} each"
    elif num_tokens > most:
        return (
            f"prompt and target have {num_tokens + 1:,} tokens; the model's context has room for "
            f"{most:,} and the one that follows"
        )
    return outside_vocabulary(model, (*prompt_ids, *target_ids))


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A request that brings the scores of several: those at `members` of the list that was joined."""

    request: Request
    members: Rows[int]


def join(requests: Rows[Request], seats: Rows[object] | None = None) -> list[Joined]:
    """Requests that ask for scores behind the same tokens become one, under the first one's name: what they compute is
    the same, and their last tokens are read off the same logits. One that generates stays by itself. `seats`: one of
    each, where only those with the same may become one."""
    groups: dict[object, list[int]] = {}
    for i, (request, seat) in enumerate(zip(requests, seats or [None] * len(requests), strict=True)):
        scoring = request.scoring
        computed = request.key if scoring is None else (request.prompt_ids, scoring.decoder_ids, seat)
        groups.setdefault(computed, []).append(i)
    return [Joined(request=_joined([requests[i] for i in group]), members=group) for group in groups.values()]


def _joined(requests: Rows[Request]) -> Request:
    if len(requests) == 1:
        return requests[0]
    scorings = [request.scoring for request in requests if request.scoring is not None]
    last_ids = dict.fromkeys(token for scoring in scorings for token in scoring.last_ids)
    num_positions = max(scoring.num_positions for scoring in scorings)
    scoring = replace(scorings[0], num_positions=num_positions, last_ids=tuple(last_ids))
    return replace(requests[0], scoring=scoring)


def scores_of(member: Request, completion: Completion) -> tuple[TokenScore, ...]:
    """The scores of one of the requests whose joined request has come to `completion`: none where it failed."""
    own, whole = member.scoring, completion.request.scoring
    assert own is not None, "its tokens are scored"
    assert whole is not None, "it was joined of scored ones"
    return tuple(completion.scores[place] for place in whole.places_of(own)) if completion.is_ok else ()
