"""The generation task: `sampling.n` requests per prompt, one for each sample (completion)."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from ..config.settings import SamplingConfig
from ..errors import require
from ..model.loading import LoadedModel
from ..requests.encoding import require_text
from ..requests.joining import add_hidden_beams, join_requests
from ..requests.prompts import Rejected, make_request
from ..sequences.sequence import Completion, Request
from .prompt import Prompt, PromptLike, tokenize_prompts
from .task import Complete, ResultStream, RuntimeTask

Result: TypeAlias = Completion | Rejected
CompletionStream: TypeAlias = ResultStream[Result]


@dataclass(frozen=True, kw_only=True)
class GenerationTask(RuntimeTask[PromptLike, Prompt, Result]):
    """Generation of `sampling.n` completions per prompt. `seen_ids`: prompt id -> position of its prompt, over all
    windows."""

    sort_keys: ClassVar[tuple[str, ...]] = ("prompt_index", "sample_index")
    sampling: SamplingConfig
    seen_ids: dict[str, int] = field(default_factory=dict)

    def require_supported(self, model: LoadedModel) -> None:
        require_text(model)

    def parse(self, value: PromptLike, index: int) -> Prompt:
        return Prompt.from_value(value, index)

    def results(
        self, model: LoadedModel, inputs: Sequence[tuple[int, Prompt]], complete: Complete
    ) -> Generator[Result]:
        require_unique_ids(inputs, self.seen_ids)
        pairs = zip(inputs, make_requests(model, self.sampling, inputs), strict=True)
        samples = [(index, item) for (index, _), made in pairs for item in repeat_samples(made, self.sampling.n)]
        for index, item in samples:
            if isinstance(item, Rejected):
                yield replace(item, prompt_index=index)
        indices = [index for index, item in samples if isinstance(item, Request)]
        # Hidden beams are computed but not returned: they have no members.
        joined = list(add_hidden_beams(join_requests([item for _, item in samples if isinstance(item, Request)])))
        for position, completion in complete([each.request for each in joined]):
            for member in joined[position].members:
                yield replace(completion, prompt_index=indices[member])


def repeat_samples(request: Request | Rejected, count: int) -> list[Request | Rejected]:
    """Returns `count` copies of a request, with `sample_index` from 0 on."""
    return [request, *(replace(request, sample_index=index) for index in range(1, count))]


def require_unique_ids(prompts: Sequence[tuple[int, Prompt]], seen_ids: dict[str, int]) -> None:
    """Adds the prompts' ids to `seen_ids` (id -> position). Raises ConfigError for a duplicate id."""
    for index, prompt in prompts:
        id = prompt.id or str(index)
        first = seen_ids.setdefault(id, index)
        require(first == index, f"prompts {first} and {index} have the same id {id!r}: ids must be unique")


def make_requests(
    model: LoadedModel, sampling: SamplingConfig, prompts: Sequence[tuple[int, Prompt]]
) -> list[Request | Rejected]:
    """Makes one request per prompt, or a `Rejected` with the error. Raises ConfigError for chat messages without a chat
    template, and for stop strings without a tokenizer."""
    limits = {sampling.max_new_tokens, *(prompt.max_new_tokens for _, prompt in prompts)}
    max_tokens = None if 0 in limits else model.shape.context_tokens
    tokenized = tokenize_prompts(model, [prompt for _, prompt in prompts], max_tokens, keeps_empty=True)
    requests: list[Request | Rejected] = []
    for (index, prompt), ids in zip(prompts, tokenized, strict=True):
        id = prompt.id or str(index)
        if isinstance(ids, str) and ids:
            requests.append(Rejected(id=id, error=ids))  # a str that is not empty is an error
        else:
            requests.append(make_request(model, sampling, id, ids, prompt.overrides))
    return requests
