"""Chats are rendered as transformers renders them, and a template's refusal is told in one clear error."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from jobs.io.chat import TemplateRefusal, render, require_template
from jobs.io.config import GenerateConfig
from jobs.io.dataset import DatasetConfig, DatasetKind
from jobs.io.generation import generate
from jobs.io.parts import read_generations
from jobs.io.run_dir import RunDirectory
from runtime import Runtime, RuntimeConfig
from runtime.config import ModelConfig, SamplingConfig
from runtime.errors import ConfigError
from runtime.model.tokenizer import byte_level_tokenizer
from tests.support import Reference

NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """Which reads special tokens where a text spells them, as those of chat models do."""
    tokenizer = byte_level_tokenizer(640)
    tokenizer.chat_template = template
    tokenizer.split_special_tokens = False
    return tokenizer


@pytest.fixture
def model(tmp_path: Path, reference: Callable[[str], Reference]) -> ModelConfig:
    """A checkpoint whose template takes no system message."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in reference("llama").directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tokenizer_with(NO_SYSTEM).save_pretrained(directory)
    return ModelConfig(name="hf", path=str(directory))


def rows(output_root: Path, model: ModelConfig, chats: list[list[dict[str, str]]], **settings: object) -> list[dict]:
    path = output_root / "chats.jsonl"
    path.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats))
    dataset = DatasetConfig(  # pyright: ignore
        kind=DatasetKind.jsonl, path=str(path), chat_template=True, messages_field="chat", **settings
    )
    config = GenerateConfig(
        run="case",
        output_root=str(output_root),
        model=model,
        dataset=dataset,
        sampling=SamplingConfig(max_new_tokens=2),
    )
    generate(config, lambda: False)
    table = read_generations(RunDirectory(path=output_root / "generate" / "case"))
    return sorted(table.to_pylist(), key=lambda row: row["id"])


def test_a_chat_ends_with_the_opening_of_the_answer_and_has_one_bos() -> None:
    tokenizer = tokenizer_with(NO_SYSTEM)
    assert render(tokenizer, [USER]) == "<|bos|><user>Hi<assistant>"


def test_a_rendered_chat_has_the_ids_that_apply_chat_template_gives(model: ModelConfig) -> None:
    runtime = Runtime(RuntimeConfig(model=model))
    tokenizer = runtime.model.tokenizer
    assert tokenizer is not None
    ids = runtime.tokenize([render(tokenizer, [USER])], is_rendered=True)[0]
    assert list(ids) == tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert runtime.tokenize(["Hi"])[0][0] == tokenizer.bos_token_id


def test_a_chat_that_the_template_refuses_is_an_error_row_in_the_templates_words(
    tmp_path: Path, model: ModelConfig
) -> None:
    good, bad = rows(tmp_path, model, [[USER], [SYSTEM, USER]])
    assert (good["status"], bad["status"]) == ("ok", "error")
    assert bad["error"] == "the model's chat template refuses the messages: no system role"
    assert good["num_prompt_tokens"] == 1 + len("<user>Hi<assistant>")


def test_a_system_prompt_that_no_row_could_use_is_refused_before_anything_is_written(
    tmp_path: Path, model: ModelConfig
) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.system_prompt.*takes no system message \(no system role\)"):
        rows(tmp_path, model, [[USER]], system_prompt="Be brief.")
    assert not (tmp_path / "generate").exists()


@pytest.mark.parametrize("tokenizer", [None, tokenizer_with(None)])
def test_chats_without_a_template_are_refused(tokenizer: PreTrainedTokenizerFast | None) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.chat_template=true.*no chat template"):
        require_template(tokenizer, DatasetConfig(chat_template=True))
    require_template(tokenizer, DatasetConfig())


@pytest.mark.parametrize("template", ["{{ messages[0].content | tojson | nothing }}", "{{ 1 + messages[0].content }}"])
def test_a_template_that_breaks_on_messages_is_a_refusal(template: str) -> None:
    with pytest.raises(TemplateRefusal):
        render(tokenizer_with(template), [USER])
