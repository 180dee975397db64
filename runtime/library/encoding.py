"""Tasks of encoding, which computes results from a prompt without generating: embedding, classification and mask
filling, with the results `Embedded`, `Classified` and `Filled`."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np

from ..config.settings import Pooling, Readout
from ..errors import require
from ..model.loading import LoadedModel
from ..requests.encoding import EncodingSpec, make_encoding, require_readable
from ..requests.prompts import Rejected
from ..sequences.sequence import Completion, Request, Vector
from .prompt import Prompt, PromptLike, tokenize_prompts
from .task import Complete, RuntimeTask


@dataclass(frozen=True, kw_only=True)
class _EncodingResult:
    """Common fields of the results. `prompt_index`: position of the prompt in the input. If `error` is set, the fields
    of subclasses are empty."""

    prompt_index: int
    id: str
    num_prompt_tokens: int = 0
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, kw_only=True, eq=False)
class Embedded(_EncodingResult):
    """A prompt's vector in float32; empty if `error` is set."""

    vector: Vector


@dataclass(frozen=True, kw_only=True)
class Classified(_EncodingResult):
    """A classifier's output for a prompt. `logits` and `probabilities` have one number per entry of `labels`.

    Probabilities are the softmax of logits; for multi-label classifiers or a single label, the sigmoid of each logit.
    With a single label, as of reward models and rankers, the logit is the `reward`."""

    logits: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def label(self) -> str | None:
        """The likeliest label; None if the model has a single label."""
        return self.labels[self.logits.index(max(self.logits))] if len(self.logits) > 1 else None

    @property
    def reward(self) -> float | None:
        return self.logits[0] if len(self.logits) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Filled(_EncodingResult):
    """The likeliest tokens for each mask token of a prompt, with log-probabilities. `token_ids` and `logprobs` have one
    tuple per mask, best token first. `text`: the prompt with the best token in place of each mask, without special
    tokens."""

    text: str = ""
    token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[float, ...], ...] = ()


Encoded: TypeAlias = Embedded | Classified | Filled


E = TypeVar("E", bound=Encoded)


@dataclass(frozen=True, kw_only=True)
class EncodingTask(RuntimeTask[PromptLike, Prompt, E]):
    """A task that encodes each prompt as `spec` describes, with results of the class `kind`."""

    spec: EncodingSpec
    kind: type[E]

    def require_supported(self, model: LoadedModel) -> None:
        require_readable(model, self.spec)

    def parse(self, value: PromptLike, index: int) -> Prompt:
        return Prompt.from_value(value, index)

    def results(self, model: LoadedModel, inputs: Sequence[tuple[int, Prompt]], complete: Complete) -> Generator[E]:
        tokenized = tokenize_prompts(model, [prompt for _, prompt in inputs], model.shape.context_tokens)
        requests, indices, rejected = list[Request](), list[int](), list[Rejected]()
        for (index, prompt), ids in zip(inputs, tokenized, strict=True):
            id = prompt.id or str(index)
            failed = Rejected(id=id, error=ids) if isinstance(ids, str) else None
            request = failed or make_encoding(model, id, () if isinstance(ids, str) else ids, self.spec)
            if isinstance(request, Rejected):
                rejected.append(replace(request, prompt_index=index))
            else:
                requests.append(request)
                indices.append(index)
        failed_results = (error_result(rejection, self.spec.readout) for rejection in rejected)
        results = (make_result(model, self.spec, indices[i], completion) for i, completion in complete(requests))
        for each in chain(failed_results, results):
            assert isinstance(each, self.kind)
            yield each


def embedding_task(pooling: str | Pooling | None, *, normalize: bool) -> EncodingTask[Embedded]:
    """A task that returns one vector per prompt. Raises ConfigError."""
    names = [pooling.value for pooling in Pooling]
    require(isinstance(pooling, Pooling | None) or pooling in names, f"pooling must be one of {names}, got {pooling!r}")
    spec = EncodingSpec(pooling=None if pooling is None else Pooling(pooling), normalize=normalize)
    return EncodingTask(spec=spec, kind=Embedded)


def mask_filling_task(model: LoadedModel, num_top: int) -> EncodingTask[Filled]:
    """A task that returns the likeliest tokens per mask. Raises ConfigError."""
    vocab_size = model.shape.vocab_size
    require(1 <= num_top <= vocab_size, f"num_top must be 1 to {vocab_size:,}, got {num_top}")
    return EncodingTask(spec=EncodingSpec(readout=Readout.masks, num_top=num_top), kind=Filled)


CLASSIFICATION_TASK = EncodingTask(spec=EncodingSpec(readout=Readout.classes), kind=Classified)


def error_result(rejected: Rejected, readout: Readout) -> Encoded:
    """Makes the result for a prompt that was rejected or failed."""
    common = _EncodingResult(
        prompt_index=rejected.prompt_index,
        id=rejected.id,
        error=rejected.error,
        num_prompt_tokens=rejected.num_prompt_tokens,
    )
    if readout is Readout.embedding:
        return Embedded(**vars(common), vector=np.zeros(0, np.float32))
    return (Classified if readout is Readout.classes else Filled)(**vars(common))


def make_result(model: LoadedModel, spec: EncodingSpec, index: int, completion: Completion) -> Encoded:
    """Converts the completion of the prompt at `index` of the input to the result that `spec` describes."""
    if completion.error is not None:
        rejected = Rejected(id=completion.id, error=completion.error, num_prompt_tokens=completion.num_prompt_tokens)
        return error_result(replace(rejected, prompt_index=index), spec.readout)
    common = _EncodingResult(prompt_index=index, id=completion.id, num_prompt_tokens=completion.num_prompt_tokens)
    if spec.readout is Readout.masks:
        return Filled(
            **vars(common),
            text=filled_text(model, completion),
            token_ids=tuple(score.top_ids for score in completion.scores),
            logprobs=tuple(score.top for score in completion.scores),
        )
    assert completion.vector is not None, "its prompt was read"
    if spec.readout is Readout.embedding:
        return Embedded(**vars(common), vector=completion.vector)
    logits, names = tuple(completion.vector.tolist()), label_names(model)
    return Classified(
        **vars(common), logits=logits, probabilities=probabilities(model, completion.vector), labels=names
    )


def label_names(model: LoadedModel) -> tuple[str, ...]:
    """The names of a classifier's classes, in the order of its logits."""
    config = model.staged.model.config
    names: Mapping[int, str] = config.id2label or {}  # pyright: ignore[reportAssignmentType] - int keys since 5.0
    return tuple(str(names.get(number, number)) for number in range(config.num_labels or 0))


def probabilities(model: LoadedModel, logits: Vector) -> tuple[float, ...]:
    """The softmax of a classifier's logits; their sigmoids for a multi-label classifier or a single label."""
    values = logits.astype(np.float64)
    if len(values) == 1 or model.staged.model.config.problem_type == "multi_label_classification":
        return tuple((1 / (1 + np.exp(-values))).tolist())
    powers = np.exp(values - values.max())
    return tuple((powers / powers.sum()).tolist())


def filled_text(model: LoadedModel, completion: Completion) -> str:
    """The prompt's text with the likeliest token in place of each mask; empty without a tokenizer."""
    encoding, ids = completion.request.encoding, list(completion.request.prompt_ids)
    assert encoding is not None, "its masks are filled"
    for position, score in zip(encoding.masked, completion.scores, strict=True):
        ids[position] = score.greedy_id
    return str(model.tokenizer.decode(ids, skip_special_tokens=True)) if model.tokenizer is not None else ""
