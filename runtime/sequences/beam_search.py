"""Beams of requests in a lane: their candidates, drawn where the logits are, and what the searches come to with them.

The beams of one request are neighbours in its lane, the best first, and take part in the same passes. The state of
their search is with the first of them.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from ..attention.upload import upload
from .beams import BeamRules, BeamState, advance_beams
from .sequence import BeamTrace, FinishReason, Sequence, TokenLogprobs

# Whether tokens that a beam may come to are a whole completion: why, and where a stop string begins in its text.
Ends = Callable[[Sequence, Rows[int]], tuple[FinishReason, int | None] | None]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The best continuations of a search: of each the beam, the token, and the log-probability of the whole way.
    `own` and `top`: log-probabilities of its token, and those of the likeliest in its place, where they are asked
    for."""

    beams: Rows[int]
    tokens: Rows[int]
    scores: Rows[float]
    own: Rows[float]
    top: Rows[tuple[tuple[int, ...], tuple[float, ...]]]

    def logprobs(self, rank: int) -> list[TokenLogprobs]:
        if not self.own:
            return []
        ids, values = self.top[self.beams[rank]]
        return [TokenLogprobs(own=self.own[rank], top_ids=ids, top=values)]


class BeamSearch:
    """The searches of a run. `draw` and `tell` as the sampler's. `scores`: what processors make of log-probabilities;
    `num_top`: how many of the likeliest tokens are wanted beside each; `bans`: the settings that may forbid a token."""

    def __init__(
        self,
        rules: BeamRules,
        *,
        scores: Callable[[Rows[Sequence], torch.Tensor], torch.Tensor],
        ends: Ends,
        vocab_size: int,
        num_top: int,
        bans: Rows[str],
    ):
        self._rules, self._scores, self._ends = rules, scores, ends
        self._vocab_size, self._num_top, self._bans = vocab_size, num_top, bans

    def sample(self, sequences: Rows[Sequence], logits_BV: torch.Tensor, slice_bytes: int) -> torch.Tensor:
        """Whether each row's logits are finite, and the candidates of its search, int32 (B, numbers)."""
        size = self._rules.num_beams
        num_rows = size * max(1, slice_bytes // (4 * logits_BV.shape[-1] * size))
        slices = [slice(start, start + num_rows) for start in range(0, len(sequences), num_rows)]
        parts = list[torch.Tensor]()
        for rows in slices:  # processors see log-probabilities here, which are then summed up, as in transformers
            slice_BV = logits_BV[rows].float()
            logprobs_BV = slice_BV.log_softmax(-1)
            scores_BV, searches = self._scores(sequences[rows], logprobs_BV), list(split_searches(sequences[rows]))
            best = best_candidates(searches, scores_BV, logprobs_BV, self._rules, self._num_top)
            is_finite_B = slice_BV.abs().amax(-1) < torch.inf
            parts.append(torch.cat([is_finite_B.int()[:, None], best], 1))
        return torch.cat(parts)

    def accept(self, sequences: Rows[Sequence], drawn: torch.Tensor, step: int) -> None:
        """Takes each search a token further, or ends it by an error. Mutates the sequences."""
        begin = 0
        for beams in split_searches(sequences):
            numbers, begin = drawn[begin : begin + len(beams)], begin + len(beams)
            is_finite = numbers[:, 0].tolist()
            candidates = read_candidates(numbers[:, 1:], self._rules, self._vocab_size, self._num_top)
            place = f"at new token {len(beams[0].generated)} (pass {step})"
            if not all(is_finite):
                _fail_beams(beams, f"the model gave NaN or infinite logits {place}", is_finite)
            elif not candidates.scores[0] > -torch.inf:
                _fail_beams(beams, f"no token is left {place}: {', '.join(self._bans)} ban them all", is_finite)
            else:
                advance_search(beams, candidates, self._rules, self._ends)


def _fail_beams(beams: Rows[Sequence], error: str, is_finite: Rows[int]) -> None:
    for beam, is_sound in zip(beams, is_finite, strict=True):
        beam.fail(error)
        beam.is_broken = not is_sound


def split_searches(sequences: Rows[Sequence]) -> Iterator[Rows[Sequence]]:
    """The beams of each search."""
    begin = 0
    while begin < len(sequences):
        end = begin + sequences[begin].request.num_beams
        assert len({s.request.id for s in sequences[begin:end]}) == 1, "beams of one request are neighbours"
        yield sequences[begin:end]
        begin = end


def best_candidates(
    searches: Rows[Rows[Sequence]], scores_BV: torch.Tensor, logprobs_BV: torch.Tensor, rules: BeamRules, num_top: int
) -> torch.Tensor:
    """What `read_candidates` reads, int32 (B, numbers). `scores_BV`: log-probabilities behind the processors;
    `logprobs_BV`: before them."""
    num_beams, size = rules.num_beams, scores_BV.shape[-1]
    states = [search_state(beams) for beams in searches]
    past_B = upload([score for state in states for score in state.scores], scores_BV.device, torch.float32)
    best = (scores_BV + past_B[:, None]).view(len(searches), num_beams * size).topk(rules.num_candidates)
    parts = [best.values.view(torch.int32), best.indices.int()]
    if num_top:
        parts.append(logprobs_BV.reshape(len(searches), -1).gather(1, best.indices).view(torch.int32))
    rows = [part.reshape(len(scores_BV), rules.candidates_per_beam) for part in parts]
    if num_top:
        top = logprobs_BV.topk(num_top, -1)
        rows += [top.indices.int(), top.values.view(torch.int32)]
    return torch.cat(rows, 1)


def read_candidates(numbers: torch.Tensor, rules: BeamRules, vocab_size: int, num_top: int) -> Candidates:
    """Those of one search, whose rows `numbers` are, in host memory."""
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


def advance_search(beams: Rows[Sequence], candidates: Candidates, rules: BeamRules, ends: Ends) -> None:
    """Takes one search a token further. Mutates its beams: each has the tokens of the way that it goes on as, and
    `source` says whose keys and values go with them; where the search is over, each that is returned has its
    completion."""
    found = [(beams[beam], token) for beam, token in zip(candidates.beams, candidates.tokens, strict=True)]
    ways = list[BeamTrace | None]()
    for rank, (beam, token) in enumerate(found):
        tokens = [*beam.generated, token]
        way = None
        if (end := ends(beam, tokens)) is not None:
            logprobs = (*beam.logprobs, *candidates.logprobs(rank))
            way = BeamTrace(token_ids=tuple(tokens), finish=end[0], text_end=end[1], logprobs=logprobs)
        ways.append(way)
    state, kept = advance_beams(
        rules,
        search_state(beams),
        candidates.scores,
        ways,
        num_new=len(beams[0].generated) + 1,
        max_new=beams[0].request.max_new_tokens,
    )
    if not kept:
        for beam, hypothesis in zip(beams, state.hypotheses, strict=True):
            way = hypothesis.way
            if not beam.request.is_returned:
                beam.finish = FinishReason.length
            elif way is None:
                beam.fail("its beam search came to fewer completions than sampling.n: too few tokens may come next")
            else:
                beam.generated, beam.logprobs = list(way.token_ids), list(way.logprobs)
                beam.finish, beam.text_end, beam.beam_score = way.finish, way.text_end, hypothesis.score
        return
    news = [(*found[rank], candidates.logprobs(rank)) for rank in kept]
    made = [([*source.generated, token], [*source.logprobs, *own], source) for source, token, own in news]
    for beam, (beam.generated, beam.logprobs, beam.source) in zip(beams, made, strict=True):
        beam.search = state


def search_state(beams: Rows[Sequence]) -> BeamState[BeamTrace]:
    """The state of the search whose beams these are."""
    return beams[0].search or BeamState.first(len(beams))
