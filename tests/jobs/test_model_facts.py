"""What the files of a model and its tokenizer come to in the manifest."""

import copy
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from jobs.record.manifest import Values
from jobs.run.identity import MAX_CHARS, _flatten_values, _value_or_digest, model_facts, tokenizer_fingerprint
from runtime import Runtime, RuntimeConfig


@pytest.fixture(scope="module")
def facts() -> Values:
    return model_facts(Runtime(RuntimeConfig()).model)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = Runtime(RuntimeConfig()).model.tokenizer
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


def test_the_fingerprint_of_a_tokenizer_sees_its_words_and_its_template(tokenizer: PreTrainedTokenizerFast) -> None:
    before = tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint(copy.deepcopy(tokenizer)) == before
    other_template = copy.deepcopy(tokenizer)
    other_template.chat_template = "{{ messages }}"
    other_words = copy.deepcopy(tokenizer)
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other_words._tokenizer = Tokenizer.from_str(json.dumps(description))
    prints = {before, tokenizer_fingerprint(other_template), tokenizer_fingerprint(other_words)}
    assert len(prints) == 3
    assert tokenizer_fingerprint(None) == "none"


def test_facts_name_file_and_key_and_neither_places_nor_versions(facts: Values) -> None:
    assert facts["config.json rope_parameters.rope_theta"] == 10000.0
    assert facts["generation_config.json eos_token_id"] == [2]
    assert not [key for key in facts if "path" in key or "version" in key or key.endswith(" dtype")]
    assert not [key for key, value in facts.items() if isinstance(value, str) and value.startswith("/")]


def test_what_json_cannot_hold_and_what_is_long_has_a_short_form_of_its_own() -> None:
    values = {"limit": [0.0, float("inf")], "path": Path("/a"), "names": dict.fromkeys(range(1000), "x"), "none": {}}
    flat = dict(_flatten_values(values, frozenset()))
    assert flat["limit"] == [0.0, "inf"]
    assert flat["path"] == "/a"
    assert flat["none"] == {}
    assert str(flat["names"]).startswith("sha256:")
    long = _value_or_digest("x" * MAX_CHARS)
    assert str(long).startswith("sha256:")
    assert long != _value_or_digest("y" * MAX_CHARS)
