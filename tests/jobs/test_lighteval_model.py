"""The model for lighteval, which is not installed here: its modules are doubles with the names of 0.13.0."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from runtime import Prompt, Runtime
from runtime.errors import ConfigError, EvaluationError


@dataclass
class Doc:
    query: str
    choices: list[str] = field(default_factory=list)
    generation_size: int | None = 8
    stop_sequences: list[str] = field(default_factory=list)
    num_samples: int = 1
    task_name: str = "addition"
    id: str = "3"


class Model:
    """What lighteval's class does for those that derive from it."""

    def tok_encode_pair(
        self: Any, context: str, choices: list[str], pairwise: bool
    ) -> tuple[list[list[int]], list[list[int]]]:
        ids = self.tokenizer.encode(context, add_special_tokens=self.add_special_tokens)
        return [ids for _ in choices], [self.tokenizer.encode(each, add_special_tokens=False) for each in choices]


def modules() -> dict[str, ModuleType]:
    found = {
        "models.abstract_model": {"LightevalModel": Model, "ModelConfig": object},
        "models.model_output": {"ModelResponse": SimpleNamespace},
        "models.utils": {"uses_chat_template": lambda tokenizer, override_chat_template: override_chat_template},
        "tasks.prompt_manager": {
            "PromptManager": lambda **_: SimpleNamespace(prepare_prompt=lambda doc: f"Q: {doc.query}\nA:")
        },
        "tasks.requests": {"Doc": Doc},
    }
    made = {name: ModuleType(name) for name in ("lighteval", "lighteval.models", "lighteval.tasks")}
    for name, values in found.items():
        module = ModuleType(name)
        vars(module).update(values)
        made[f"lighteval.{name}"] = module
    return made


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "jobs.evaluating.lighteval_model", raising=False)
    from jobs.evaluating import lighteval_model

    yield lighteval_model
    sys.modules.pop("jobs.evaluating.lighteval_model", None)


def model(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, words: str) -> Any:
    monkeypatch.setenv("WEIGHTSTREAM", words)
    return adapter.WeightstreamModel(SimpleNamespace(system_prompt=None))


def test_a_completion_ends_before_its_stop_and_a_long_prompt_loses_its_beginning(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = model(adapter, monkeypatch, "model=tiny chat_template=false")
    plain, stopped, long = Doc("Sort these numbers: 3 1 2"), Doc("Sort these numbers: 3 1 2"), Doc("7 " * 3000)
    stopped.stop_sequences = ["3"]
    answers = asked.greedy_until([plain, stopped, long])
    assert [answer.text for answer in answers[:2]] == [[" 1 2 3"], [" 1 2 "]]
    assert len(answers[2].input_tokens) == asked.max_length - 8
    ids = asked.tokenizer.encode(f"Q: {long.query}\nA:")
    assert answers[2].input_tokens == ids[-len(answers[2].input_tokens) :]
    with Runtime(model="tiny", max_new_tokens=8) as runtime:
        (result,) = runtime.generate([Prompt(token_ids=answers[2].input_tokens)])
    assert answers[2].output_tokens == [list(result.token_ids)]


def test_choices_have_the_scores_of_the_library_and_texts_those_of_their_windows(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = model(adapter, monkeypatch, "model=tiny chat_template=false")
    docs = [Doc("What is 7 + 5?", [" 12", " 13"]), Doc("What is 2 + 3?", [" 6", " 5", " 7"])]
    answers = asked.loglikelihood(docs)
    texts = asked.loglikelihood_rolling(docs)
    with Runtime(model="tiny") as runtime:
        tokenizer = asked.tokenizer
        ids = [[tokenizer.encode(each, add_special_tokens=False) for each in doc.choices] for doc in docs]
        scores = runtime.score([(f"Q: {doc.query}\nA:", own) for doc, own in zip(docs, ids, strict=True)])
        documents = runtime.score_documents([doc.query for doc in docs])
    flat = [value for answer in answers for value in answer.logprobs]
    assert flat == pytest.approx([score.logprob for score in scores], abs=1e-4)
    assert [answer.argmax_logits_eq_gold for answer in answers] == [[True, False], [False, True, False]]
    assert [answer.output_tokens for answer in answers] == ids
    assert [answer.logprobs[0] for answer in texts] == pytest.approx([each.logprob for each in documents], abs=1e-4)


def test_samples_are_drawn_or_refused(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    doc = Doc("What is 94 + 78?", num_samples=3)
    with pytest.raises(EvaluationError, match=r"addition, 3: 3 samples .* need temperature"):
        model(adapter, monkeypatch, "model=tiny chat_template=false").greedy_until([doc])
    drawn = model(adapter, monkeypatch, "model=tiny chat_template=false temperature=3.0").greedy_until([doc])
    assert len(set(drawn[0].text)) > 1
    assert len(drawn[0].text) == 3


def test_settings_are_words_of_the_environment(adapter: ModuleType) -> None:
    path = "model='/some dir' offload=nvme host_memory_gib=1.5 chat_template=false"
    expected = {"model": "/some dir", "offload": "nvme", "host_memory_gib": 1.5, "chat_template": False}
    assert adapter.parse_settings(path) == expected
    with pytest.raises(ConfigError, match="WEIGHTSTREAM: 'tiny' is not key=value"):
        adapter.parse_settings("tiny")


def test_the_file_can_be_loaded_by_its_path() -> None:
    source = Path(__file__).parents[2] / "jobs" / "evaluating" / "lighteval_model.py"
    assert "from ." not in source.read_text()
