"""OpenAI's batch files: a field is honoured or an error of its line, and one line in is one line out."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.config.settings import GenerateConfig, Output
from jobs.datasets import DatasetConfig, DatasetKind, Row, read_rows
from jobs.exporting.config import ErrorRows, ExportConfig, ExportFormat
from jobs.exporting.export import export, write_batch_files
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from runtime import Runtime
from runtime.config.settings import PolicyConfig, PolicyKind, SamplingConfig, SamplingOverrides
from runtime.errors import ConfigError
from tests.generations import read_generations
from tests.jobs.kill_support import Kills

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "strict": True, "schema": {"type": "object", "properties": {"a": {"type": "null"}}}},
}


def line(custom_id: str, url: str = TEXT, **body: object) -> dict[str, object]:
    asked = {"messages": HI} if url == CHAT else {"prompt": f"Say {custom_id}"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **asked, **body}}


def written(path: Path, lines: list) -> str:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return str(path)


def rows_of(folder: Path, *lines: object, **settings: object) -> list[Row]:
    path = written(folder / "in.jsonl", list(lines))
    return read_rows(DatasetConfig(kind=DatasetKind["openai_batch"], path=path, **settings))  # pyright: ignore


@pytest.mark.parametrize(
    ("url", "body", "overrides"),
    [
        (TEXT, {}, {}),
        (TEXT, {"max_tokens": 3, "stop": "x", "n": 2}, {"max_new_tokens": 3, "stop": ["x"], "n": 2}),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 5}, {"max_new_tokens": 5}),
        (CHAT, {"temperature": 0.5, "top_p": 0.9, "seed": 4}, {"temperature": 0.5, "top_p": 0.9, "seed": 4}),
        (CHAT, {"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        (CHAT, {"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        (CHAT, {"top_k": -1, "repetition_penalty": 1.2}, {"top_k": 0, "repetition_penalty": 1.2}),
        (TEXT, {"min_tokens": 2, "ignore_eos": True}, {"min_new_tokens": 2, "ignore_eos": True}),
        (TEXT, {"stop_token_ids": [], "skip_special_tokens": True, "priority": 0}, {}),
        (CHAT, {"logprobs": True}, {"logprobs": 1}),
        (CHAT, {"logprobs": True, "top_logprobs": 7}, {"logprobs": 7}),
        (CHAT, {"logprobs": False}, {}),
        (TEXT, {"logprobs": 0}, {"logprobs": 1}),
        (CHAT, {"user": "me", "metadata": {"a": "b"}, "stream": False, "presence_penalty": 0, "top_k": None}, {}),
        (TEXT, {"echo": False, "best_of": 1, "suffix": None, "logit_bias": {}}, {}),
        (CHAT, {"response_format": {"type": "text"}}, {}),
        (CHAT, {"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        (CHAT, {"response_format": FORMAT}, {"json_schema": '{"type":"object","properties":{"a":{"type":"null"}}}'}),
        (TEXT, {"guided_json": {"type": "null"}}, {"json_schema": '{"type":"null"}'}),
        (TEXT, {"guided_json": '{"type": "null"}', "guided_regex": None}, {"json_schema": '{"type": "null"}'}),
        (TEXT, {"guided_regex": "a+"}, {"regex": "a+"}),
        (TEXT, {"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        (TEXT, {"structured_outputs": {"grammar": 'start: "a"', "json_object": None}}, {"grammar": 'start: "a"'}),
        (TEXT, {"structured_outputs": {"json": {"type": "null"}}}, {"json_schema": '{"type":"null"}'}),
        (TEXT, {"structured_outputs": {"json_object": True}}, {"json_schema": '{"type": "object"}'}),
    ],
)  # fmt: skip
def test_what_a_body_asks_is_what_its_row_asks(
    url: str, body: dict[str, object], overrides: dict[str, object], tmp_path: Path
) -> None:
    (row,) = rows_of(tmp_path, line("a", url, **body))
    assert row.error is None
    assert row.overrides == SamplingOverrides(**overrides)  # pyright: ignore
    assert (row.messages, row.prompt) == ((HI, "") if url == CHAT else (None, "Say a"))


@pytest.mark.parametrize(
    ("url", "body", "why"),
    [
        (TEXT, {"top_k": 0.5}, r"body\.top_k is '0\.5', not a whole number"),
        (TEXT, {"top_k": -2}, r"body\.top_k must be -1 or more"),
        (TEXT, {"min_p": 2}, r"body\.min_p must be 0 to 1, got 2"),
        (TEXT, {"ignore_eos": 1}, r"body\.ignore_eos is not true or false"),
        (TEXT, {"stop_token_ids": [5]}, r"body\.stop_token_ids='\[5\]' is not supported"),
        (TEXT, {"wings": 2}, r"body\.wings is not supported"),
        (CHAT, {"best_of": 2}, r"body\.best_of='2' is not"),
        (CHAT, {"stream": True}, r"body\.stream='True' is not"),
        (CHAT, {"stream": 0}, r"body\.stream='0' is not"),
        (CHAT, {"presence_penalty": 0.5}, r"body\.presence_penalty"),
        (
            CHAT,
            {"response_format": {"type": "xml"}},
            r"body\.response_format\.type must be text, json_object or json_schema",
        ),
        (CHAT, {"response_format": "json"}, r"body\.response_format is not an object"),
        (
            CHAT,
            {"response_format": {"type": "json_schema"}},
            r"response_format\.json_schema is not an object with a name",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            r"json_schema\.schema is null, not text",
        ),
        (
            TEXT,
            {"structured_outputs": {"json": {}, "regex": "a"}},
            r"outputs\.json and body\.structured_outputs\.regex exclude",
        ),
        (TEXT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "exclude each other"),
        (
            TEXT,
            {"structured_outputs": {"structural_tag": "x"}},
            r"structured_outputs\.structural_tag is not supported",
        ),
        (TEXT, {"guided_choice": "yes"}, r"body\.guided_choice is not a list of texts"),
        (TEXT, {"guided_choice": ["yes", 3]}, r"a text of body\.guided_choice is a number"),
        (TEXT, {"guided_regex": ["a"]}, r"body\.guided_regex is a list"),
        (CHAT, {"tool_choice": "required"}, r"body\.tool_choice"),
        (CHAT, {"tools": ["x"]}, r"body\.tools has items that are not objects"),
        (CHAT, {"prompt": "x"}, r"body\.prompt is not supported"),
        (TEXT, {"messages": HI}, r"body\.messages is not supported"),
        (CHAT, {"messages": []}, r"body\.messages is not a list of messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "type 'input_audio'"),
        (TEXT, {"prompt": ["a", "b"]}, r"body\.prompt has several"),
        (TEXT, {"prompt": [[1], [2]]}, r"body\.prompt has several prompts: write a line for each"),
        (TEXT, {"prompt": [1, True]}, r"body\.prompt is not a text or list of token ids"),
        (TEXT, {"prompt": [1, "a"]}, r"body\.prompt is not a text or list of token ids"),
        (TEXT, {"prompt": []}, r"body\.prompt is not a text or list of token ids"),
        (TEXT, {"prompt": [[]]}, r"body\.prompt is not a text or list of token ids"),
        (TEXT, {"model": None}, r"body\.model is null"),
        (TEXT, {"max_tokens": 1.5}, r"body\.max_tokens is '1\.5', not a whole number"),
        (TEXT, {"max_tokens": True}, r"body\.max_tokens is 'True'"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "differ: set one"),
        (TEXT, {"temperature": 2.5}, r"body\.temperature must be 0 to 2, got 2\.5"),
        (TEXT, {"top_p": "x"}, r"body\.top_p is 'x', not a number"),
        (TEXT, {"n": 0}, r"body\.n must be 1 to 10000, got 0"),
        (TEXT, {"n": 10**8}, r"body\.n must be 1 to 10000, got 100000000"),
        (TEXT, {"repetition_penalty": 10**400}, r"body\.repetition_penalty must be 0 to 1\.79\S+, got 10{59}\.\.\.$"),
        (TEXT, {"temperature": 10**400}, r"body\.temperature must be 0 to 2, got 10{59}\.\.\.$"),
        (TEXT, {"seed": 10**400}, r"body\.seed must be 0 to \d+, got 10{59}\.\.\.$"),
        (TEXT, {"seed": -1}, r"body\.seed must be 0 to"),
        (TEXT, {"stop": [3]}, "stop string"),
        (CHAT, {"top_logprobs": 2}, r"body\.top_logprobs needs body\.logprobs=true"),
        (CHAT, {"logprobs": 3}, r"body\.logprobs is not true or false"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, r"body\.top_logprobs must be 0 to 20"),
        (CHAT, {"chat_template_kwargs": {"messages": 1}}, r"chat_template_kwargs\.messages is reserved"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_an_error_of_its_line_that_names_it(
    url: str, body: dict[str, object], why: str, tmp_path: Path
) -> None:
    bad, good = rows_of(tmp_path, line("a", url, **body), line("b"))
    assert (bad.id, good.error) == ("a", None)
    with pytest.raises(ValueError, match=rf"^in\.jsonl, line 1, byte 0: .*{why}"):
        raise ValueError(bad.error)


BAD_LINES = {
    "{nonsense": "not JSON",
    '{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}': "method must be 'POST', got 'GET'",
    '{"custom_id": "x", "method": "POST", "url": "/v2", "body": {}}': "url must be one of /v1/chat/completions",
    '{"custom_id": "x", "method": "POST", "url": "/v1/responses", "body": {}}': "url must be one of /v1/chat/",
    '{"custom_id": "x", "method": "POST", "url": "/v1/completions"}': "body is not an object",
    '{"custom_id": "x", "method": "POST", "url": ["/v1/completions"], "body": {}}': "url must be one of",
    '{"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {}}': "custom_id is a number, not text",
    '{"method": "POST", "url": "/v1/completions", "body": {}}': "custom_id is null, not text",
    '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {}, "y": 1}': "unknown field 'y'",
    json.dumps(line("good")): "custom_id 'good' is already used by request 0",
    json.dumps(line("bad-row-11", prompt="")): "body.prompt is empty",
}


def test_a_bad_line_costs_that_line_alone(tmp_path: Path) -> None:
    first, *bad, last = rows_of(
        tmp_path, line("good"), *(text.replace('"x"', f'"x{n}"') for n, text in enumerate(BAD_LINES)), "[]"
    )
    assert (first.id, first.error) == ("good", None)
    assert [row.error is not None for row in [*bad, last]] == [True] * (len(BAD_LINES) + 1)
    for row, why in zip(bad, BAD_LINES.values(), strict=True):
        assert why in (row.error or ""), row.error
    assert len({row.id for row in [first, *bad, last]}) == len(BAD_LINES) + 2


def test_tools_and_keywords_go_to_the_template_and_a_system_prompt_comes_first(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    first, second = rows_of(
        tmp_path, line("a", CHAT, **asked), line("b", CHAT, tools=tools, tool_choice="none"), system_prompt="Be brief."
    )
    assert first.template_kwargs == {"tools": tools, "enable_thinking": False}
    assert second.template_kwargs == {}
    assert first.messages == [{"role": "system", "content": "Be brief."}, *HI]


def test_a_message_of_the_developer_is_a_system_prompt(tmp_path: Path) -> None:
    said = [{"role": "developer", "content": "Add."}, *HI]
    (row,) = rows_of(tmp_path, line("a", CHAT, messages=said), system_prompt="Be brief.")
    assert row.messages == [{"role": "system", "content": "Add."}, *HI]


def test_settings_that_would_be_ignored_are_refused() -> None:
    batch = DatasetKind["openai_batch"]
    with pytest.raises(ConfigError, match=r"needs dataset\.path=requests\.jsonl"):
        DatasetConfig(kind=batch)
    with pytest.raises(ConfigError, match=r"dataset\.chat_template is not supported by dataset\.kind=openai_batch"):
        DatasetConfig(kind=batch, path="x", chat_template=True)
    with pytest.raises(ConfigError, match=r"output=openai_batch needs dataset=openai_batch, got dataset=tasks"):
        GenerateConfig(output=Output.openai_batch)
    kept = DatasetConfig(kind=batch, path="x", keep_columns=False)
    with pytest.raises(ConfigError, match=r"output=openai_batch needs dataset\.keep_columns=true"):
        GenerateConfig(dataset=kept)
    assert not GenerateConfig(dataset=kept, output=Output.parts).has_batch_files


NUM_LINES, NUM_BAD = 1000, 50


def thousand_lines() -> list:
    """Of both urls, every twentieth bad, each in another way."""
    bad = [*BAD_LINES, json.dumps(line("x", n=2, temperature=0)), json.dumps(line("x", CHAT, repetition_penalty=0))]
    made: list = []
    for number in range(NUM_LINES):
        if number % (NUM_LINES // NUM_BAD) == 7:
            made.append(bad[number // 20 % len(bad)].replace('"x"', f'"x{number}"').replace("good", "r0"))
        elif number % 3:
            made.append(line(f"r{number}", TEXT, max_tokens=1, n=1 + number % 2, temperature=1.0, logprobs=number % 2))
        else:
            made.append(line(f"r{number}", CHAT, max_tokens=1, logprobs=True, top_logprobs=number % 3))
    return made


def config_of(folder: Path, path: str) -> GenerateConfig:
    return GenerateConfig(
        run="batch",
        output_root=str(folder),
        dataset=DatasetConfig(kind=DatasetKind["openai_batch"], path=path),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=128, num_micro_batches=2),
        sampling=SamplingConfig(max_new_tokens=2),
    )


def run_whole(folder: Path, path: str) -> RunDirectory:
    outcome = generate(config_of(folder, path), lambda: False)
    assert outcome.exit_code == 3
    write_batch_files(outcome.directory)
    return RunDirectory(path=outcome.directory)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunDirectory]:
    """The path of the thousand lines, and the run that answered them."""
    folder = tmp_path_factory.mktemp("whole")
    path = written(folder / "requests.jsonl", thousand_lines())
    return path, run_whole(folder, path)


def read(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_one_line_in_is_one_line_out_in_order_and_errors_are_apart(whole: tuple[str, RunDirectory]) -> None:
    asked = {line["custom_id"]: line for line in thousand_lines() if isinstance(line, dict)}
    done, failed = read(whole[1].batch_output), read(whole[1].batch_errors)
    assert (len(done), len(failed)) == (NUM_LINES - NUM_BAD, NUM_BAD)
    assert [line["custom_id"] for line in done] == list(asked)
    assert len({line["id"] for line in [*done, *failed]}) == NUM_LINES
    assert {line["response"]["status_code"] for line in failed} == {400}
    for line in failed:
        assert line["error"]["message"] == line["response"]["body"]["error"]["message"] != ""
    together = ExportConfig(
        run=str(whole[1].path),
        out=str(whole[1].path / "all.jsonl"),
        format=ExportFormat.openai_batch,
        errors=ErrorRows.keep,
    )
    assert export(together).num_errors == NUM_BAD
    assert read(whole[1].path / "all.jsonl")[7] == failed[0]
    assert sorted(map(str, read(whole[1].path / "all.jsonl"))) == sorted(map(str, [*done, *failed]))


def test_results_are_of_openais_own_types(whole: tuple[str, RunDirectory]) -> None:
    chat_types = pytest.importorskip("openai.types.chat", reason="needs the extra: pip install -e '.[client]'")
    from openai.types import Completion

    asked = {line["custom_id"]: line for line in thousand_lines() if isinstance(line, dict)}
    for result in read(whole[1].batch_output):
        request = asked[result["custom_id"]]
        body: Mapping = result["response"]["body"]
        kind = chat_types.ChatCompletion if request["url"] == CHAT else Completion
        made = kind.model_validate(body, strict=True)
        assert made.to_dict() == body
        n = request["body"].get("n", 1)
        assert [choice.index for choice in made.choices] == list(range(n))
        assert made.usage is not None
        assert made.usage.completion_tokens == n
        if request["url"] == CHAT:
            (token,) = made.choices[0].logprobs.content
            assert len(token.top_logprobs) == request["body"]["top_logprobs"]
            assert token.token == made.choices[0].message.content or made.choices[0].finish_reason == "stop"
        else:
            (choice, *_) = made.choices
            assert len(choice.logprobs.top_logprobs[0]) == request["body"]["logprobs"]


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("most", [6, 12])
def test_a_kill_changes_no_byte_of_the_results(
    most: int, whole: tuple[str, RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = whole
    run = tmp_path / "first" / "generate" / "batch"
    run.mkdir(parents=True)
    kills = Kills(monkeypatch)
    with kills.copied(run, tmp_path / "killed", most=most) as copies:
        generate(config_of(tmp_path / "first", path), lambda: False)
    assert len(copies) == most
    assert not (copies[-1] / "_SUCCESS.json").exists()
    shutil.copytree(copies[-1], tmp_path / "again" / "generate" / "batch")
    found = run_whole(tmp_path / "again", path)
    assert found.batch_output.read_bytes() == expected.batch_output.read_bytes()
    assert found.batch_errors.read_bytes() == expected.batch_errors.read_bytes()


def test_a_line_says_what_its_answer_must_be_and_one_that_cannot_be_costs_that_line(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the extra: pip install -e '.[structured]'")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    formats: list[dict[str, object]] = [
        {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}},
        {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "wrong"}}},
    ]
    asked = [line("a", CHAT, response_format=formats[0]), line("b", CHAT, response_format=formats[1])]
    asked += [line("c", guided_choice=["yes", "no"]), line("d", guided_regex="[0-9]{3}")]
    config = config_of(tmp_path, written(tmp_path / "in.jsonl", asked))
    outcome = generate(replace(config, sampling=SamplingConfig(max_new_tokens=150)), lambda: False)
    write_batch_files(outcome.directory)
    first, third, fourth = (line["response"]["body"]["choices"][0] for line in read(outcome.directory / "output.jsonl"))
    assert set(json.loads(first["message"]["content"])) == {"ok"}
    assert third["text"] in ("yes", "no")
    assert fourth["text"].isdigit()
    (failed,) = read(outcome.directory / "errors.jsonl")
    assert failed["response"]["status_code"] == 400
    assert "sampling.json_schema is refused by llguidance: Invalid type: wrong" in failed["error"]["message"]


def test_urls_of_azures_form_a_slash_behind_and_any_case_of_the_method_or_none_ask_the_same(tmp_path: Path) -> None:
    forms: dict[str, dict[str, object]] = {
        "plain": {},
        "azure": {"url": "/chat/completions"},
        "slash": {"url": "/v1/chat/completions/"},
        "small": {"method": "post"},
        "none": {"method": None},
        "text": {"url": "/completions/", "body": {"model": "m", "prompt": "Hi"}},
    }
    asked = [{**line(name, CHAT), **form} for name, form in forms.items()]
    asked[-2].pop("method")
    outcome = generate(config_of(tmp_path, written(tmp_path / "in.jsonl", asked)), lambda: False)
    write_batch_files(outcome.directory)
    assert read(outcome.directory / "errors.jsonl") == []
    answers = {each["custom_id"]: each["response"]["body"] for each in read(outcome.directory / "output.jsonl")}
    assert [answers[name]["object"] for name in forms] == ["chat.completion"] * 5 + ["text_completion"]
    assert len({answers[name]["choices"][0]["message"]["content"] for name in list(forms)[:5]}) == 1


def test_a_prompt_of_token_ids_asks_what_its_text_asks_and_ids_outside_the_vocabulary_cost_their_line(
    tmp_path: Path,
) -> None:
    ids = list(Runtime().tokenize(["Say it"])[0])
    prompts: dict[str, object] = {"text": "Say it", "ids": ids, "list": [ids], "big": [*ids, 10**30], "neg": [-1]}
    path = written(tmp_path / "in.jsonl", [line(name, prompt=prompt) for name, prompt in prompts.items()])
    outcome = generate(config_of(tmp_path, path), lambda: False)
    rows = {row["id"]: row for row in read_generations(RunDirectory(path=outcome.directory)).to_pylist()}
    assert [rows[name]["error"] for name in ("text", "ids", "list")] == [None] * 3
    assert rows["ids"]["token_ids"] == rows["text"]["token_ids"] == rows["list"]["token_ids"]
    assert rows["ids"]["num_prompt_tokens"] == len(ids)
    assert all("outside the model's vocabulary" in rows[name]["error"] for name in ("big", "neg"))


def test_a_schema_too_deep_for_its_reader_costs_its_line_alone(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the extra: pip install -e '.[structured]'")
    deep = {str(depth): '{"items":' * depth + "{}" + "}" * depth for depth in (200, 2_000, 100_000)}
    lone = {"surrogate": '{"enum":["\\ud83d"]}'}
    asked = [line("good", max_tokens=2), *(line(name, guided_json=text) for name, text in {**deep, **lone}.items())]
    outcome = generate(config_of(tmp_path, written(tmp_path / "in.jsonl", asked)), lambda: False)
    rows = {row["id"]: row["error"] for row in read_generations(RunDirectory(path=outcome.directory)).to_pylist()}
    assert rows.pop("good") is None
    assert rows.keys() == {*deep, *lone}
    assert all("sampling.json_schema is" in error for error in rows.values()), rows


@pytest.mark.parametrize(
    "texts",
    [['{"custom_id": "1"}'], ['{"body": {}}', '{"url": "/v1/completions"}'], ["no JSON", "[]", "5"], ["{}"]],
    ids=["one field", "a field each", "no JSON", "no field"],
)
def test_lines_that_lack_fields_are_errors_of_their_own_even_where_all_do(texts: list[str], tmp_path: Path) -> None:
    outcome = generate(config_of(tmp_path, written(tmp_path / "in.jsonl", list(texts))), lambda: False)
    assert outcome.exit_code == 3
    write_batch_files(outcome.directory)
    assert (outcome.directory / "output.jsonl").read_text() == ""
    errors = read(outcome.directory / "errors.jsonl")
    assert [each["response"]["status_code"] for each in errors] == [400] * len(texts)


def test_a_response_format_is_what_openais_own_types_take() -> None:
    pydantic = pytest.importorskip("pydantic")
    types = pytest.importorskip("openai.types.chat.completion_create_params", reason="needs the extra: '.[client]'")
    kind = pydantic.TypeAdapter(types.ResponseFormat)
    for value in (FORMAT, {"type": "text"}, {"type": "json_object"}):
        assert kind.validate_python(value) == value


def test_what_was_thought_has_a_column_and_a_field_of_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, written(tmp_path / "in.jsonl", [line("a", CHAT), line("b", prompt="Hi")]))
    sampling = SamplingConfig(max_new_tokens=9, ignore_eos=True, reasoning=["A:", "</think>"])
    outcome = generate(replace(config, sampling=sampling), lambda: False)
    write_batch_files(outcome.directory)
    rows = read_generations(RunDirectory(path=outcome.directory)).to_pylist()
    thinking, plain = sorted(rows, key=lambda row: row["id"])  # the template ends with the first tag
    assert (thinking["completion"], plain["reasoning"]) == ("", None)
    assert thinking["reasoning"]
    assert plain["completion"]
    chat, text = (result["response"]["body"]["choices"][0] for result in read(outcome.directory / "output.jsonl"))
    assert chat["message"]["reasoning_content"] == thinking["reasoning"]
    assert (chat["message"]["content"], text["text"]) == ("", plain["completion"])
    types = pytest.importorskip("openai.types.chat", reason="needs the extra: pip install -e '.[client]'")
    types.ChatCompletionMessage.model_validate(chat["message"], strict=True)


@pytest.mark.slow(
    "jobs/test_openai_batch.py::test_a_line_says_what_its_answer_must_be_and_one_that_cannot_be_costs_that_line"
)
def test_a_response_format_binds_what_comes_behind_the_reasoning(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    config = config_of(
        tmp_path, written(tmp_path / "in.jsonl", [line("a", CHAT), line("b", CHAT, response_format=form)])
    )

    def asked(reasoning: list[str] | None) -> dict[str, Any]:
        sampling = SamplingConfig(max_new_tokens=200, reasoning=reasoning)
        outcome = generate(replace(config, run=f"batch-{len(reasoning or [])}", sampling=sampling), lambda: False)
        write_batch_files(outcome.directory)
        return {r["custom_id"]: r["response"]["body"]["choices"][0] for r in read(outcome.directory / "output.jsonl")}

    said = asked(None)["a"]["message"]["content"]
    tag = said.split()[0]  # the template ends with the first tag
    choices = asked(["A:", tag])
    free, bound = (choices[name]["message"] for name in "ab")
    assert bound["reasoning_content"] == free["reasoning_content"] == said.partition(tag)[0].strip()
    assert free["content"] == said.partition(tag)[2].lstrip()
    assert json.loads(bound["content"]) == {"a": 3}
    assert choices["b"]["finish_reason"] == "stop"
