"""Chats are rendered as transformers renders them, and a template's refusal is told in one clear error."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.run.requests import require_template
from jobs.run.tasks.generate import generate
from runtime import Runtime, RuntimeConfig
from runtime.config.settings import ModelConfig, SamplingConfig
from runtime.errors import ConfigError
from runtime.requests.chat import ChatRenderer, TemplateRefusal
from runtime.synthesize.tokenizer import byte_level_tokenizer
from tests.generations import read_generations
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


def render(tokenizer: PreTrainedTokenizerBase, *chats: list[dict[str, str]]) -> list[str]:
    with ChatRenderer(tokenizer, cpu_seconds=1) as renderer:
        return [outcome(renderer, chat) for chat in chats]


def outcome(renderer: ChatRenderer, chat: list[dict[str, str]]) -> str:
    try:
        return renderer.render(chat)
    except TemplateRefusal as error:
        return f"refused: {error}"


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
    assert render(tokenizer, [USER]) == ["<|bos|><user>Hi<assistant>"]


def test_a_rendered_chat_has_the_ids_that_apply_chat_template_gives(model: ModelConfig) -> None:
    runtime = Runtime(RuntimeConfig(model=model))
    tokenizer = runtime.model.tokenizer
    assert tokenizer is not None
    ids = runtime.tokenize(render(tokenizer, [USER]), is_rendered=True)[0]
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


FAILURES = {
    "{{ 1 + messages[0].content }}": "TypeError: unsupported operand",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{% for i in range(10 ** 6) %}{% endfor %}": "OverflowError: Range too big",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError: ",
    "{{ 'a' * (3000000000 + messages | length) }}": "MemoryError",
    "{{ 'a' * (17 * 2 ** 20 + messages | length) }}": "it renders 17,825,79",
    "{{ messages[5].content.x }}": "list object has no element 5",
    "{{ ''.__class__.__mro__ }}": "access to attribute",
    "{{ raise_exception('\\ud800\\u0000 a\\n b') }}": "\\ud800\\x00 a b",
    "{{ raise_exception('y' * 3000000) }}": "y" * 500,
}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def chat(content: object) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(content)}]


def test_a_text_has_at_most_so_many_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.requests.chat.TEXT_CHARS", 5)
    fits, exceeds = render(tokenizer_with("{{ messages[0].content }}"), chat("12345"), chat("123456"))
    assert fits == "12345"
    assert "renders 6 characters; the limit is 5" in exceeds


def test_whatever_a_template_fails_with_costs_that_chat_alone(real_renderers: None) -> None:
    cases = "".join(f"{{% if messages[0].content == '{n}' %}}{code}{{% endif %}}" for n, code in enumerate(FAILURES))
    tokenizer = tokenizer_with(cases + "{{ messages[0].content }}")
    answers = render(tokenizer, chat("first"), *map(chat, range(len(FAILURES))), chat("last"))
    assert (answers[0], answers[-1]) == ("first", "last")
    for reason, answer in zip(FAILURES.values(), answers[1:-1], strict=True):
        assert answer.startswith(f"refused: {reason}")
        assert len(answer) < 600
        assert answer.isprintable(), "an error of a row is one line, which a file of UTF-8 holds"


def test_a_chat_is_the_same_text_whenever_it_is_rendered() -> None:
    """A run that goes on renders its rows again."""
    tokenizer = tokenizer_with("{{ range(100000) | random }}")
    assert len({text for _ in range(2) for text in render(tokenizer, [USER], [USER])}) == 1


def test_messages_that_are_no_json_are_refused() -> None:
    odd = [{"role": "user", "content": {"a set"}}]
    answer, good = render(tokenizer_with(NO_SYSTEM), odd, [USER])  # pyright: ignore[reportArgumentType]
    assert answer == "refused: they are not valid JSON: Object of type set is not JSON serializable"
    assert good == "<|bos|><user>Hi<assistant>"


def test_a_template_that_does_not_compile_is_a_refusal() -> None:
    (answer,) = render(tokenizer_with("{{ messages | nothing }}"), chat("x"))
    assert "No filter named 'nothing'" in answer


def test_a_template_that_does_not_end_is_ended_and_the_next_chat_is_rendered(real_renderers: None) -> None:
    tokenizer = tokenizer_with("{% if messages[0].content == 'bad' %}" + ENDLESS + "{% endif %}done")
    assert render(tokenizer, chat("good"), chat("bad"), chat("good")) == [
        "done", "refused: it takes more than 1 s of processor time", "done"
    ]  # fmt: skip


def test_a_template_that_never_ends_is_refused_after_a_few_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.requests.chat.MAX_CRASHES", 1)
    with pytest.raises(
        ConfigError, match="rendered none of the first 1 chats: it takes more than 1 s of processor time"
    ):
        render(tokenizer_with(ENDLESS), chat("x"))


def test_chats_are_rendered_as_apply_chat_template_does() -> None:
    odd = 'é\ud800\n"{{ x }} 東京'
    chats = [[USER], [SYSTEM, USER, {"role": "assistant", "content": odd}, USER], [{"role": odd, "content": ""}]]
    template = NO_SYSTEM.replace("raise_exception('no system role')", "m.content | upper | tojson")
    tokenizer = tokenizer_with(template + "{{ eos_token }}{{ messages | tojson(indent=2) }}")
    assert render(tokenizer, *chats) == [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats
    ]


def test_a_template_that_fails_for_all_rows_alike_is_refused_before_anything_is_written(
    tmp_path: Path, model: ModelConfig
) -> None:
    with pytest.raises(ConfigError, match=r"chat template fails for all 3 rows: no system role; fix the"):
        rows(tmp_path, model, [[SYSTEM, USER]] * 3)
    assert not (tmp_path / "generate").exists()


def test_a_single_row_that_is_itself_at_fault_is_an_error_row(tmp_path: Path, model: ModelConfig) -> None:
    (row,) = rows(tmp_path, model, [[SYSTEM, USER]])
    assert row["error"] == "the model's chat template refuses the messages: no system role"
