"""What transformers' beam search says to prompts of tiny checkpoints, and what ours does."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from runtime import Runtime, SamplingConfig
from runtime.requests.joining import JoinedRequest, add_hidden_beams, join_requests
from runtime.sequences.sequence import Completion, Request
from tests.support import Reference, made_once, transformers_model

NUM_NEW, NUM_PROMPTS = 8, 2
LENGTHS = (21, 11)  # of prompts: one has a page that is full, the other fills its first as it is answered
NOISE = 1e-4  # of logits, whose rounding differs by about 1e-5


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of a search, by transformers' names."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | str

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(n=self.num_beams, max_new_tokens=NUM_NEW, **vars(self))


GRID = [
    Search(num_beams=num_beams, length_penalty=penalty, early_stopping=stopping)
    for num_beams, penalty, stopping in product((2, 4), (0.6, 1.0, 2.0), (True, False, "never"))
]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Completions of one prompt, the best first, and the score of each."""

    tokens: list[list[int]]
    scores: list[float]


@dataclass(frozen=True, kw_only=True)
class Searched:
    """`answers[k][i]`: to prompt i by the k-th settings, or none. `ends`: two tokens that end a completion."""

    prompts: list[list[int]]
    ends: list[int]
    answers: list[list[Found]]

    @staticmethod
    def shared(reference: Reference, home: Path, places: Sequence[int]) -> "Searched":
        """The answers by the settings at these places, made once in `home`."""

        def make(home: Path) -> None:
            (home / "beams.json").write_text(json.dumps(_made(transformers_model(reference.directory), places)))

        prompts, ends, answers = json.loads((made_once(home, make) / "beams.json").read_text())
        found = [[Found(tokens=tokens, scores=scores) for tokens, scores in each] for each in answers]
        return Searched(prompts=prompts, ends=ends, answers=found)


class Noise(LogitsProcessor):
    """Changes the scores of the second of two prompts by less than what is a clear choice."""

    def __init__(self, num_beams: int):
        self._num_beams, self._generator = num_beams, torch.Generator().manual_seed(0)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[self._num_beams :] += NOISE * torch.randn(scores[self._num_beams :].shape, generator=self._generator)
        return scores


def clear_search(
    model: PreTrainedModel, prompt: Sequence[int], ends: Sequence[int], **settings: object
) -> Found | None:
    """What `generate` comes to; None where it is no clear choice."""
    num_beams = settings["num_beams"]
    assert isinstance(num_beams, int)
    ids = torch.tensor([prompt, prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        num_return_sequences=num_beams,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([Noise(num_beams)]),
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    first = 1 if model.config.is_encoder_decoder else len(prompt)
    rows = [_whole(row, ends) for row in out.sequences[:, first:].tolist()]
    if rows[:num_beams] != rows[num_beams:]:
        return None
    return Found(tokens=rows[:num_beams], scores=out.sequences_scores[:num_beams].tolist())


def _whole(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to the first that ends them; what follows is fill."""
    place = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: place + 1]


def _made(
    model: PreTrainedModel, places: Sequence[int]
) -> tuple[list[list[int]], list[int], list[list[tuple[list[list[int]], list[float]]]]]:
    generator = torch.Generator().manual_seed(0)
    ends = list[int]()
    clear = list[tuple[list[int], dict[int, Found]]]()
    for length in LENGTHS:
        while len(clear) < LENGTHS.index(length) + 1:
            prompt = torch.randint(5, 600, (length,), generator=generator).tolist()
            if not ends:
                ends = _ends(model, prompt)
            found = {place: clear_search(model, prompt, ends, **vars(GRID[place])) for place in places}
            if None not in found.values():
                clear.append((prompt, {place: each for place, each in found.items() if each is not None}))
    answers = [[(found[k].tokens, found[k].scores) for _, found in clear if k in found] for k in range(len(GRID))]
    return [prompt for prompt, _ in clear], ends, answers


def _ends(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Tokens that beams come to: some end early, and others take their places."""
    found = None
    while found is None:
        found = clear_search(model, prompt, (), num_beams=4)
        prompt = [*prompt[1:], prompt[0]]
    return [found.tokens[1][2], found.tokens[0][4]]


def searched(runtime: Runtime, of: Searched, sampling: SamplingConfig) -> Iterator[list[Completion]]:
    """The completions of each of the prompts."""
    object.__setattr__(runtime.model, "eos_token_ids", frozenset(of.ends))
    runtime.config = replace(runtime.config, sampling=sampling)
    results = runtime.generate(of.prompts)
    for place in range(len(of.prompts)):
        yield [each for each in results if each.prompt_index == place and isinstance(each, Completion)]


def searched_requests(runtime: Runtime, prompts: Sequence[Sequence[int]]) -> list[JoinedRequest]:
    """The requests of all beams."""
    requests = [runtime.request(str(index), prompt) for index, prompt in enumerate(prompts)]
    samples = [each for one in requests for each in runtime.samples(one) if isinstance(each, Request)]
    return list(add_hidden_beams(join_requests(samples)))


def require_equal(runtime: Runtime, of: Searched, places: Sequence[int]) -> None:
    """Raises AssertionError where our search differs from transformers', by one of the settings at `places`."""
    for place in places:
        for found, expected in zip(searched(runtime, of, GRID[place].sampling), of.answers[place], strict=True):
            assert [list(each.token_ids) for each in found] == expected.tokens, GRID[place]
            assert [each.beam_score for each in found] == pytest.approx(expected.scores, abs=1e-3)
            assert [each.sample_index for each in found] == [*range(len(found))]


References = Callable[[str], Reference]
