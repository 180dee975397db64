"""A model for lighteval: `lighteval custom NAME lighteval_model.py TASKS`. Calls the Python class `Runtime` and not the
Hydra command line, because lighteval and Hydra need different versions of a package. The variable
`WEIGHTSTREAM="model=DIR offload=nvme"` sets keyword arguments of `Runtime`.

lighteval loads this file by its path, so relative imports do not work.
"""

import os
import shlex
from collections.abc import Sequence
from itertools import groupby
from typing import NoReturn

import yaml
from lighteval.models.abstract_model import LightevalModel, ModelConfig  # pyright: ignore[reportMissingImports]
from lighteval.models.model_output import ModelResponse  # pyright: ignore[reportMissingImports]
from lighteval.models.utils import uses_chat_template  # pyright: ignore[reportMissingImports]
from lighteval.tasks.prompt_manager import PromptManager  # pyright: ignore[reportMissingImports]
from lighteval.tasks.requests import Doc  # pyright: ignore[reportMissingImports]
from transformers import PreTrainedTokenizerBase

from runtime import Prompt, Runtime
from runtime.errors import ConfigError, EvaluationError

VARIABLE = "WEIGHTSTREAM"


def parse_settings(words: str) -> dict[str, object]:
    """Parses `key=value` words into keyword arguments; values are YAML. Raises ConfigError for any other word."""
    settings: dict[str, object] = {}
    for word in shlex.split(words):
        key, sign, value = word.partition("=")
        if not sign:
            raise ConfigError(f"{VARIABLE}: {word!r} is not key=value")
        settings[key] = yaml.safe_load(value)
    return settings


class _NoCache:
    """Stub for lighteval's answer cache."""

    def _init_registry(self, registry: object) -> None:
        pass


class WeightstreamModel(LightevalModel):
    """lighteval model backed by `Runtime`. Tokenizes as lighteval's transformers model does: with special tokens, and
    with the chat template if there is one, unless `chat_template=false` is set."""

    def __init__(self, config: ModelConfig):
        words = parse_settings(os.environ.get(VARIABLE, ""))
        template = words.pop("chat_template", None)
        self.config, self._cache = config, _NoCache()
        self._runtime = Runtime(**words)  # pyright: ignore[reportArgumentType]
        model = self._runtime.model
        if model.tokenizer is None:
            raise ConfigError(f"{model.checkpoint.path} has no tokenizer, which tasks need: set tokenizer=")
        self._tokenizer = model.tokenizer
        self._is_chat = uses_chat_template(tokenizer=self._tokenizer, override_chat_template=template)
        self._prompts = PromptManager(
            use_chat_template=self._is_chat, tokenizer=self._tokenizer, system_prompt=config.system_prompt
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def add_special_tokens(self) -> bool:
        return True

    @property
    def max_length(self) -> int:
        return self._runtime.model.shape.context_tokens

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """Completions of each prompt, up to its stop sequences; sampled if `temperature` is set. Truncates long prompts
        from the left."""
        prompts: list[list[int]] = []
        samples: list[Prompt] = []
        for doc in docs:
            ids = self._tokenizer.encode(self._prompts.prepare_prompt(doc), add_special_tokens=self.add_special_tokens)
            max_new_tokens = min(doc.generation_size or max(1, self.max_length - len(ids)), self.max_length - 1)
            max_prompt_tokens = self.max_length - max_new_tokens  # at least 1
            prompts.append(list(ids)[-max_prompt_tokens:])
            if doc.num_samples > 1 and not self._runtime.config.sampling.temperature:
                _raise_error(doc, f"{doc.num_samples} samples per prompt need temperature > 0")
            prompt = Prompt(token_ids=prompts[-1], max_new_tokens=max_new_tokens, stop=list(self._stop(doc)))
            samples += [prompt] * doc.num_samples
        doc_indices = [index for index, doc in enumerate(docs) for _ in range(doc.num_samples)]
        completions: list[list[tuple[int, ...]]] = [[] for _ in docs]
        for index, result in zip(doc_indices, self._runtime.generate(samples), strict=True):
            completions[index].append(result.token_ids if result.is_ok else _raise_error(docs[index], result.error))
        return [
            ModelResponse(
                input_tokens=ids,
                output_tokens=[list(completion) for completion in doc_completions],
                text=[self._text(completion, self._stop(doc)) for completion in doc_completions],
            )
            for doc, ids, doc_completions in zip(docs, prompts, completions, strict=True)
        ]

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """Log-probability of each choice given its prompt, and True if it is the greedy one."""
        pairs: list[tuple[int, list[int], list[int]]] = []
        for index, doc in enumerate(docs):
            encoded = self.tok_encode_pair(self._prompts.prepare_prompt(doc), doc.choices, pairwise=True)
            for context, choice in zip(*encoded, strict=True):
                begin = max(0, len(context) + len(choice) - self.max_length)  # truncates from the left
                pairs.append((index, list(context)[begin:], list(choice)))
        scores = self._runtime.score([(context, choice) for _, context, choice in pairs])
        responses: list[ModelResponse] = []
        for index, group in groupby(zip(pairs, scores, strict=True), key=lambda scored: scored[0][0]):
            choices = list(group)  # of one document: ((document index, context, choice), score)
            (_, first_context, _), _ = choices[0]
            for _, score in choices:
                if not score.is_ok:
                    _raise_error(docs[index], score.error)
            responses.append(
                ModelResponse(
                    input_tokens=first_context,
                    output_tokens=[choice for (_, _, choice), _ in choices],
                    logprobs=[score.logprob for _, score in choices],
                    argmax_logits_eq_gold=[score.is_greedy for _, score in choices],
                )
            )
        return responses

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """Log-probability of each text in windows of the model's context; each token counts once."""
        scores = self._runtime.score_documents([doc.query for doc in docs])
        for doc, score in zip(docs, scores, strict=True):
            if not score.is_ok:
                _raise_error(doc, score.error)
        return [
            ModelResponse(input=doc.query, logprobs=[score.logprob]) for doc, score in zip(docs, scores, strict=True)
        ]

    def cleanup(self) -> None:
        self._runtime.close()

    def _stop(self, doc: Doc) -> Sequence[str]:
        """Stop sequences of a completion; none for chats, which end with their own token."""
        return () if self._is_chat else tuple(doc.stop_sequences or ())

    def _text(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Decodes a completion without its prompt, as lighteval's own model does."""
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        for term in stop:
            text = text.partition(term)[0]
        return text


def _raise_error(doc: Doc, reason: str | None) -> NoReturn:
    raise EvaluationError(f"{doc.task_name}, {doc.id}: {reason}")
