"""The scoring task: computes log-probabilities of given target texts after a prompt, and of whole documents."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias, TypeGuard

from ..errors import ConfigError, require
from ..model.loading import LoadedModel
from ..requests.encoding import require_text
from ..requests.joining import JoinedRequest, join_requests, member_scores
from ..requests.prompts import Rejected
from ..requests.scoring import TextPair, TextSize, document_windows, encode_pairs, make_scoring
from ..sequences.sequence import Completion, Request
from .prompt import Prompt, PromptLike, render_prompts
from .task import Complete, RuntimeTask

Target: TypeAlias = str | Sequence[int]


@dataclass(frozen=True)
class Targets:
    """A prompt and the `targets` to score after it. A target is a text or token ids. Sampling settings in a `Prompt`
    are ignored. Raises ConfigError for an empty list."""

    prompt: PromptLike
    targets: Sequence[Target]

    def __post_init__(self) -> None:
        require(not isinstance(self.targets, str), f"targets must be a list, got the text {self.targets!r:.80}")
        require(len(self.targets) > 0, "targets must not be empty")

    @staticmethod
    def from_value(value: "TargetsLike", index: int) -> "Targets":
        """Converts a tuple. Raises ConfigError with its position `index` in the input."""
        if isinstance(value, Targets):
            return value
        if isinstance(value, tuple) and len(value) == 2:
            prompt, given = value
            several = list(given) if isinstance(given, Sequence) else []
            targets = [given] if _is_target(given) else several
            valid = [target for target in targets if _is_target(target)]
            if valid and len(valid) == len(targets):
                return Targets(prompt, valid)
        raise ConfigError(
            f"pair {index} must be (prompt, target), (prompt, [target, ...]) or Targets; a target is a text or a list "
            f"of token ids; got {value!r:.80}"
        )


TargetsLike: TypeAlias = tuple[PromptLike, Target] | tuple[PromptLike, Sequence[Target]] | Targets


def _is_target(value: object) -> TypeGuard[Target]:
    """True for a text, or a sequence of integers, also of other libraries such as NumPy."""
    if isinstance(value, str):
        return True
    return isinstance(value, Sequence) and bool(value) and all(hasattr(token, "__index__") for token in value)


@dataclass(frozen=True, kw_only=True)
class _Logprobs:
    """Natural log-probabilities of tokens; empty if `error` is set. `prompt_index`: position of the prompt or document
    in the input."""

    prompt_index: int
    token_logprobs: tuple[float, ...] = ()
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def logprob(self) -> float:
        return sum(self.token_logprobs) if self.is_ok else float("nan")


@dataclass(frozen=True, kw_only=True)
class Scored(_Logprobs):
    """The score of one target given its prompt.

    `token_ids`: the target's tokens. `token_logprobs`: the log-probability of each, by log-softmax in float32 of the
    head's logits; `logprob` is their sum, NaN if `error` is set. `is_greedy`: greedy decoding would generate the
    target. `top_token_ids` and `top_logprobs`: the `sampling.logprobs` likeliest tokens per position, best first.
    `target_index`: position of the target in the prompt's list of targets. `id`: the prompt's id.
    """

    target_index: int
    id: str
    token_ids: tuple[int, ...] = ()
    is_greedy: bool = False
    top_token_ids: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    num_prompt_tokens: int = 0

    @property
    def num_target_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class ScoredDocument(_Logprobs):
    """The rolling log-likelihood of a document: the log-probability of each token given the tokens before it, in
    windows of the model's context. `num_words` (as in lm-eval) and `num_bytes` (UTF-8) are 0 for documents of token
    ids. Perplexity is `exp(-logprob / n)` with n tokens, words or bytes. If `error` is set, `logprob` is NaN."""

    num_words: int = 0
    num_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_logprobs)


@dataclass(frozen=True, kw_only=True)
class ScoringBatch:
    """The scoring requests of one window of inputs.

    `members`: one request per valid target. `unscored`: one result per member, without scores yet. `joined`: the
    requests to compute, merged from members with equal context. `rejected`: results of invalid targets."""

    members: Sequence[Request]
    unscored: Sequence[Scored]
    joined: Sequence[JoinedRequest]
    rejected: Sequence[Scored]

    @property
    def requests(self) -> list[Request]:
        return [each.request for each in self.joined]

    def make_scores(self, index: int, completion: Completion) -> Iterator[Scored]:
        """Yields the scores of all targets of `joined[index]` from its completion."""
        for i in self.joined[index].members:
            if completion.error is not None:
                yield replace(self.unscored[i], error=completion.error)
                continue
            scores, ids = member_scores(self.members[i], completion), self.unscored[i].token_ids
            yield replace(
                self.unscored[i],
                token_logprobs=tuple(score.own for score in scores),
                is_greedy=all(score.greedy_id == token for score, token in zip(scores, ids, strict=True)),
                top_token_ids=tuple(score.top_ids for score in scores if score.top_ids),
                top_logprobs=tuple(score.top for score in scores if score.top),
            )


def make_scoring_batch(model: LoadedModel, pairs: Sequence[tuple[int, Targets]]) -> ScoringBatch:
    """Tokenizes prompts and targets, and makes requests. `pairs`: (position in the input, prompt and targets). Raises
    CheckpointError for texts without a tokenizer, ConfigError for chat messages without a chat template."""
    prompts = [Prompt.from_value(pair.prompt, index) for index, pair in pairs]
    texts = render_prompts(model, prompts)
    encoded = encode_pairs(
        model,
        [
            TextPair(prompt=text, targets=pair.targets, is_rendered=prompt.messages is not None)
            for text, prompt, (_, pair) in zip(texts, prompts, pairs, strict=True)
        ],
    )
    members, unscored, rejected = list[Request](), list[Scored](), list[Scored]()
    for (index, _), prompt, targets in zip(pairs, prompts, encoded, strict=True):
        for number, pair_or_error in enumerate(targets):  # (prompt ids, target ids), or the text of an error
            scored = Scored(prompt_index=index, target_index=number, id=prompt.id or str(index))
            if isinstance(pair_or_error, str):
                rejected.append(replace(scored, error=pair_or_error))
                continue
            prompt_ids, target_ids = pair_or_error
            request = make_scoring(model, str(len(members)), prompt_ids, target_ids)
            scored = replace(scored, num_prompt_tokens=len(prompt_ids))
            if isinstance(request, Rejected):
                rejected.append(replace(scored, error=request.error))
            else:
                members.append(request)
                unscored.append(replace(scored, token_ids=tuple(target_ids)))
    return ScoringBatch(members=members, unscored=unscored, joined=join_requests(members), rejected=rejected)


class ScoringTask(RuntimeTask[TargetsLike, Targets, Scored]):
    """Scoring of each target of each prompt."""

    sort_keys: ClassVar[tuple[str, ...]] = ("prompt_index", "target_index")

    def require_supported(self, model: LoadedModel) -> None:
        require_text(model)

    def parse(self, value: TargetsLike, index: int) -> Targets:
        return Targets.from_value(value, index)

    def results(
        self, model: LoadedModel, inputs: Sequence[tuple[int, Targets]], complete: Complete
    ) -> Generator[Scored]:
        batch = make_scoring_batch(model, inputs)
        yield from batch.rejected
        for index, completion in complete(batch.requests):
            yield from batch.make_scores(index, completion)


def score_documents(
    model: LoadedModel,
    documents: Iterable[str | Sequence[int]],
    max_tokens: int | None,
    score: Callable[[Sequence[Targets]], Sequence[Scored]],
) -> list[ScoredDocument]:
    """Scores documents in windows of up to `max_tokens` tokens (None: the model's context) by calling `score`. Raises
    ConfigError if the tokenizer has neither a BOS nor an EOS token to begin with, or if `max_tokens` is negative."""
    texts = list(documents)
    pairs, owners = list[Targets](), list[int]()  # one per window; owner: index of the window's document
    errors, values = list[str | None](), list[list[float]]()  # one per document; values: log-probabilities of tokens
    for index, windows in enumerate(document_windows(model, texts, max_tokens)):
        values.append([])
        if isinstance(windows, str):  # an error instead of windows
            errors.append(windows)
            continue
        errors.append(None)
        for prompt_ids, target_ids in windows:
            pairs.append(Targets(Prompt(token_ids=list(prompt_ids)), [list(target_ids)]))
            owners.append(index)
    for owner, scored in zip(owners, score(pairs) if pairs else (), strict=True):
        values[owner] += scored.token_logprobs
        errors[owner] = errors[owner] or scored.error
    sizes = [TextSize.from_text(document if isinstance(document, str) else "") for document in texts]
    return [
        ScoredDocument(
            prompt_index=index,
            num_words=size.num_words,
            num_bytes=size.num_bytes,
            token_logprobs=() if error else tuple(own),
            error=error,
        )
        for index, (size, error, own) in enumerate(zip(sizes, errors, values, strict=True))
    ]
