"""Beam search within lanes (micro-batches): selects candidates on the logits' device, and advances the searches.

Each beam is a sequence. The beams of one request are adjacent in its lane, best first, and run in the same passes. The
first beam has the state of the search. A candidate is a beam with one more token.
Shapes: B rows (beams) of logits, V vocabulary."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import dataclass

import torch

from ..attention.upload import upload
from .beams import BeamRules, BeamState, advance_beams
from .sequence import BeamTrace, FinishReason, Sequence, TokenLogprobs

# Returns the finish reason and the text's length if a beam with these tokens is complete, else None.
EndCheck = Callable[[Sequence, Rows[int]], tuple[FinishReason, int | None] | None]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The best candidates of a search, best first. Per candidate: index of its beam, its new token, and its cumulative
    log-probability (score). The last two fields are empty unless log-probabilities are requested. `own`: those of the
    new tokens before logits processors; `top`: per beam, ids and log-probabilities of the most likely tokens."""

    beams: Rows[int]
    tokens: Rows[int]
    scores: Rows[float]
    own: Rows[float]
    top: Rows[tuple[tuple[int, ...], tuple[float, ...]]]

    def logprobs(self, rank: int) -> list[TokenLogprobs]:
        """The log-probabilities for the new token of candidate `rank`; empty if not requested."""
        if not self.own:
            return []
        ids, values = self.top[self.beams[rank]]
        return [TokenLogprobs(own=self.own[rank], top_ids=ids, top=values)]


class BeamSearch:
    """The beam searches of a run, with the same `sample` and `accept` as `Sampler`. `process_logprobs`: applies logits
    processors. `num_top`: number of top log-probabilities per token. `bans`: settings that ban tokens, for messages."""

    def __init__(
        self,
        rules: BeamRules,
        *,
        process_logprobs: Callable[[Rows[Sequence], torch.Tensor], torch.Tensor],
        find_end: EndCheck,
        vocab_size: int,
        num_top: int,
        bans: Rows[str],
    ):
        self._rules, self._process_logprobs, self._find_end = rules, process_logprobs, find_end
        self._vocab_size, self._num_top, self._bans = vocab_size, num_top, bans

    def sample(self, sequences: Rows[Sequence], logits_BV: torch.Tensor, slice_bytes: int) -> torch.Tensor:
        """Returns int32 (B, numbers) on the logits' device: per row, whether its logits are finite, and its columns of
        `best_candidates`. Works in slices of whole searches, of about `slice_bytes` of logits."""
        num_beams = self._rules.num_beams
        num_rows = num_beams * max(1, slice_bytes // (4 * logits_BV.shape[-1] * num_beams))
        slices = [slice(start, start + num_rows) for start in range(0, len(sequences), num_rows)]
        parts = list[torch.Tensor]()
        for rows in slices:  # as in transformers' beam search, processors get log-probabilities instead of logits
            slice_BV = logits_BV[rows].float()
            logprobs_BV = slice_BV.log_softmax(-1)
            scores_BV = self._process_logprobs(sequences[rows], logprobs_BV)
            searches = list(split_searches(sequences[rows]))
            best = best_candidates(searches, scores_BV, logprobs_BV, self._rules, self._num_top)
            is_finite_B = slice_BV.abs().amax(-1) < torch.inf
            parts.append(torch.cat([is_finite_B.int()[:, None], best], 1))
        return torch.cat(parts)

    def accept(self, sequences: Rows[Sequence], drawn: torch.Tensor, step: int) -> None:
        """Advances each search by a token, or ends it with an error. `drawn`: result of `sample`, in host memory.
        Mutates the sequences."""
        begin = 0
        for beams in split_searches(sequences):
            numbers, begin = drawn[begin : begin + len(beams)], begin + len(beams)
            is_finite = numbers[:, 0].tolist()
            candidates = read_candidates(numbers[:, 1:], self._rules, self._vocab_size, self._num_top)
            position = f"at new token {len(beams[0].generated)} (pass {step})"
            if not all(is_finite):
                _fail_beams(beams, f"the model gave NaN or infinite logits {position}", is_finite)
            elif not candidates.scores[0] > -torch.inf:
                _fail_beams(beams, f"every token is banned {position} by {', '.join(self._bans)}", is_finite)
            else:
                advance_search(beams, candidates, self._rules, self._find_end)


def _fail_beams(beams: Rows[Sequence], error: str, is_finite: Rows[int]) -> None:
    for beam, has_finite_logits in zip(beams, is_finite, strict=True):
        beam.fail(error)
        beam.is_broken = not has_finite_logits


def split_searches(sequences: Rows[Sequence]) -> Iterator[Rows[Sequence]]:
    """Yields the beams of each search."""
    begin = 0
    while begin < len(sequences):
        end = begin + sequences[begin].request.num_beams
        assert len({s.request.id for s in sequences[begin:end]}) == 1, "beams of one request must be neighbors"
        yield sequences[begin:end]
        begin = end


def best_candidates(
    searches: Rows[Rows[Sequence]], scores_BV: torch.Tensor, logprobs_BV: torch.Tensor, rules: BeamRules, num_top: int
) -> torch.Tensor:
    """Packs the best candidates of each search into int32 (B, numbers), for `read_candidates`. `scores_BV`:
    log-probabilities after logits processors; `logprobs_BV`: before.

    The list of a search's candidates is cut into equal parts, one per row, only to pack it: a row may have candidates
    of any beam. The columns are the scores of these candidates, then their indices (beam * V + token). If `num_top` is
    not 0, their own log-probabilities follow, then the ids and log-probabilities of the row's top tokens."""
    num_beams, vocab_size = rules.num_beams, scores_BV.shape[-1]
    states = [search_state(beams) for beams in searches]
    past_B = upload([score for state in states for score in state.scores], scores_BV.device, torch.float32)
    best = (scores_BV + past_B[:, None]).view(len(searches), num_beams * vocab_size).topk(rules.num_candidates)
    parts = [best.values.view(torch.int32), best.indices.int()]
    if num_top:
        parts.append(logprobs_BV.reshape(len(searches), -1).gather(1, best.indices).view(torch.int32))
    rows = [part.reshape(len(scores_BV), rules.candidates_per_beam) for part in parts]
    if num_top:
        top = logprobs_BV.topk(num_top, -1)
        rows += [top.indices.int(), top.values.view(torch.int32)]
    return torch.cat(rows, 1)


def read_candidates(numbers: torch.Tensor, rules: BeamRules, vocab_size: int, num_top: int) -> Candidates:
    """Unpacks the candidates of one search from its rows of `best_candidates`, in host memory."""
    width = rules.candidates_per_beam
    floats = numbers.contiguous().view(torch.float32)
    indices = numbers[:, width : 2 * width].flatten().tolist()
    ids = numbers[:, 3 * width : 3 * width + num_top].tolist() if num_top else []
    values = floats[:, 3 * width + num_top :].tolist() if num_top else []
    return Candidates(
        beams=[index // vocab_size for index in indices],
        tokens=[index % vocab_size for index in indices],
        scores=floats[:, :width].flatten().tolist(),
        own=floats[:, 2 * width : 3 * width].flatten().tolist() if num_top else [],
        top=[(tuple(i), tuple(v)) for i, v in zip(ids, values, strict=True)],
    )


def advance_search(beams: Rows[Sequence], candidates: Candidates, rules: BeamRules, find_end: EndCheck) -> None:
    """Advances one search by a token, and mutates its beams. Each beam continues one candidate: it gets the candidate's
    tokens, and `source`, the beam to copy the KV cache from. If the search is over, the beams that are returned get its
    completions instead."""
    beam_tokens = [(beams[beam], token) for beam, token in zip(candidates.beams, candidates.tokens, strict=True)]
    completed = list[BeamTrace | None]()
    for rank, (beam, token) in enumerate(beam_tokens):
        tokens = [*beam.generated, token]
        trace = None
        if (end := find_end(beam, tokens)) is not None:
            logprobs = (*beam.logprobs, *candidates.logprobs(rank))
            trace = BeamTrace(token_ids=tuple(tokens), finish=end[0], text_end=end[1], logprobs=logprobs)
        completed.append(trace)
    state, continued = advance_beams(
        rules,
        search_state(beams),
        candidates.scores,
        completed,
        num_new=len(beams[0].generated) + 1,
        max_new=beams[0].request.max_new_tokens,
    )
    if not continued:
        for beam, hypothesis in zip(beams, state.hypotheses, strict=True):
            trace = hypothesis.way  # the tokens of the completed beam; None: no beam was completed
            if not beam.request.is_returned:
                beam.finish = FinishReason.length
            elif trace is None:
                beam.fail("its beam search found fewer completions than sampling.n: too few tokens are allowed")
            else:
                beam.generated, beam.logprobs = list(trace.token_ids), list(trace.logprobs)
                beam.finish, beam.text_end, beam.beam_score = trace.finish, trace.text_end, hypothesis.score
        return
    continuations = [(*beam_tokens[rank], candidates.logprobs(rank)) for rank in continued]
    updates = [([*source.generated, token], [*source.logprobs, *own], source) for source, token, own in continuations]
    for beam, (generated, logprobs, source) in zip(beams, updates, strict=True):
        beam.generated, beam.logprobs, beam.source, beam.search = generated, logprobs, source, state


def search_state(beams: Rows[Sequence]) -> BeamState[BeamTrace]:
    """The state of the search of these beams."""
    return beams[0].search or BeamState.initial(len(beams))
