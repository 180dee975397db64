"""Prompts made of fields: filled in, examples in front, dotted names, contents in parts, and what a template gets."""

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.datasets import DatasetConfig, DatasetKind, Row, ShardConfig, input_digest, read_rows, shard_rows
from jobs.datasets.templates import read_template
from runtime.config.settings import SamplingOverrides
from runtime.errors import ConfigError, DatasetError
from runtime.requests.chat import ChatRenderer
from runtime.synthesize.tokenizer import byte_level_tokenizer

ASKED = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(4)]
SHOTS = [{"question": f"{n} + {n}?", "answer": 2 * n} for n in range(8)]
FEW = {"template": r"Q: {question}\nA:", "few_shot_template": r"Q: {question}\nA: {answer}"}


def written(path: Path, objects: list[dict]) -> str:
    path.write_text("".join(json.dumps(fields) + "\n" for fields in objects))
    return str(path)


def rows_of(folder: Path, objects: list[dict], **settings: object) -> list[Row]:
    path = written(folder / "in.jsonl", objects)
    return read_rows(DatasetConfig(kind=DatasetKind.jsonl, path=path, **settings))  # pyright: ignore


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Question: {question}\nAnswer:", "Question: é?\nAnswer:"),
        (r"{question}\n{{x}}\\n", "é?\n{x}\\n"),
        ("{data.deep.0}{data.deep.1.x}", "ab"),
        ("{data.n} {data.yes} {data.deep}", '3 true ["a", {"x": "b"}]'),
        ("{dotted.name}", "as it is"),
    ],
)
def test_fields_stand_where_the_template_names_them(template: str, text: str, tmp_path: Path) -> None:
    fields = {"question": "é?", "data": {"deep": ["a", {"x": "b"}], "n": 3, "yes": True}, "dotted.name": "as it is"}
    (row,) = rows_of(tmp_path, [fields], template=template)
    assert (row.prompt, row.error) == (text, None)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"a": {"c": 1}}, r"there is no field 'a\.b' \(dataset\.template\); its fields: 'a'"),
        ({"a": {"b": None}}, r"the field 'a\.b' \(dataset\.template\) is null"),
        ({"a": [{"b": 1}]}, r"there is no field 'a\.b'"),
        ({"a": {"b": "\0"}}, "NUL"),
    ],
)
def test_a_row_that_lacks_a_field_is_an_error_row(fields: dict, why: str, tmp_path: Path) -> None:
    good, bad = rows_of(tmp_path, [{"a": {"b": "x"}}, fields], template="{a.b}")
    assert good.prompt == "x"
    with pytest.raises(ValueError, match=rf"^in\.jsonl, line 2, byte \d+: .*{why}"):
        raise ValueError(bad.error)


def test_a_field_that_no_row_has_is_a_mistyped_template(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no row has the field 'qestion'.*dataset\.template"):
        rows_of(tmp_path, ASKED, template="{qestion}")


@pytest.mark.parametrize("template", ["{a", "a}", "{}", "{a!r}", "{a:>3}", "no field"])
def test_a_template_that_cannot_be_read_is_refused_by_its_key(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^dataset\.few_shot_template"):
        read_template(template, "few_shot_template")


def test_examples_stand_in_front_and_are_the_same_in_every_shard(tmp_path: Path) -> None:
    settings = {**FEW, "few_shot_path": written(tmp_path / "shots.jsonl", SHOTS), "num_examples": 3}
    rows = rows_of(tmp_path, ASKED, **settings)
    blocks = [row.prompt.split("\n\n") for row in rows]
    assert len({tuple(found[:-1]) for found in blocks}) == 1
    assert [found[-1] for found in blocks] == [f"Q: {n} + 1?\nA:" for n in range(4)]
    possible = [f"Q: {n} + {n}?\nA: {2 * n}" for n in range(8)]
    places = [possible.index(block) for block in blocks[0][:-1]]
    assert places == sorted(set(places))
    assert len(places) == 3
    shards = [shard_rows(rows, ShardConfig(index=index, count=2)) for index in range(2)]
    assert [row.prompt for row in shards[1]] == [rows[1].prompt, rows[3].prompt]
    others = {rows_of(tmp_path, ASKED, **settings, trial=trial)[0].prompt for trial in range(5)}
    assert rows[0].prompt in others
    assert len(others) > 1
    assert rows_of(tmp_path, ASKED, **(settings | {"num_examples": 8}))[0].prompt.startswith("\n\n".join(possible))


def test_examples_may_be_a_table_like_the_rows(tmp_path: Path) -> None:
    for name, objects in (("in", ASKED), ("shots", SHOTS)):
        pq.write_table(pa.Table.from_pylist(objects), tmp_path / f"{name}.parquet")
    paths = {"path": str(tmp_path / "in.parquet"), "few_shot_path": str(tmp_path / "shots.parquet")}
    for keep_columns in (True, False):
        kept = {"keep_columns": keep_columns, "num_examples": 8}
        config = DatasetConfig(kind=DatasetKind.parquet, **paths, **FEW, **kept)  # pyright: ignore
        assert read_rows(config)[3].prompt.count("A: ") == 8
        assert ("question" in read_rows(config)[3].columns) is keep_columns


@pytest.mark.parametrize(
    ("shots", "num_examples", "why"),
    [
        (SHOTS[:2], 3, r"few_shot_path=.* has 2 rows, fewer than dataset\.num_examples=3"),
        ([*SHOTS[:1], {"question": "?"}], 2, r"few_shot_path=.*line 2.*no field 'answer'"),
    ],
)
def test_examples_that_cannot_be_used_end_the_run(
    shots: list[dict], num_examples: int, why: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "shots.jsonl", shots)
    with pytest.raises(DatasetError, match=why):
        rows_of(tmp_path, ASKED, **FEW, few_shot_path=path, num_examples=num_examples)
    with pytest.raises(DatasetError, match=r"few_shot_path=/nowhere does not exist"):
        rows_of(tmp_path, ASKED, **FEW, few_shot_path="/nowhere")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"template": "{a}", "prompt_field": "b"}, r"prompt_field=b has no effect with dataset\.template"),
        ({"template": "{a}", "messages_field": "m", "chat_template": True}, "messages_field exclude each other"),
        ({"few_shot_path": "x"}, "must be set together"),
        ({"few_shot_template": "{x}"}, "must be set together"),
        ({"num_examples": 3}, r"need dataset\.few_shot_path"),
        ({"tools_field": "t"}, r"tools_field needs dataset\.chat_template=true"),
        ({"chat_template_kwargs": {"a": 1}}, r"chat_template_kwargs needs dataset\.chat_template=true"),
        ({"chat_template_kwargs": {"messages": 1}, "chat_template": True}, r"kwargs\.messages is reserved"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DatasetConfig(kind=DatasetKind.jsonl, path="x", **settings)


def test_dotted_fields_reach_into_a_batch_request(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7}
    fields = {"messages_field": "body.messages", "id_field": "own.id", "max_new_tokens_field": "body.max_tokens"}
    (row,) = rows_of(tmp_path, [{"own": {"id": 5}, "body": body}], chat_template=True, **fields)
    assert (row.id, row.messages, row.overrides) == ("5", body["messages"], SamplingOverrides(max_new_tokens=7))


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "is of type 'image_url'; only 'text'"),
        ({"role": "user", "content": ["a"]}, "part 0 .* is text, not an object"),
        ({"role": "user", "content": None}, "is null, not text"),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{"}}]}, "not JSON"),
    ],
)
def test_a_content_may_be_parts_of_text(message: dict, read: str, tmp_path: Path) -> None:
    objects = [{"m": [{"role": "user", "content": "x"}]}, {"m": [message]}]
    _, row = rows_of(tmp_path, objects, chat_template=True, messages_field="m")
    if row.error is None:
        assert row.messages == [{"role": "user", "content": read}]
    else:
        with pytest.raises(ValueError, match=read):
            raise ValueError(row.error)


def test_tool_calls_have_their_arguments_as_objects(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (row,) = rows_of(tmp_path, [{"m": chat}], chat_template=True, messages_field="m")
    assert row.messages is not None
    assert row.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}],
    }


def test_a_template_gets_the_runs_keywords_and_the_rows_tools(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(640)
    tokenizer.chat_template = "{{ messages[0].content }}|{{ thinking }}|{{ tools | length if tools else 0 }}"
    objects = [{"prompt": "a", "t": [{"type": "function"}]}, {"prompt": "b", "t": None}, {"prompt": "c", "t": "x"}]
    given = {"chat_template": True, "tools_field": "t", "chat_template_kwargs": {"thinking": False}}
    first, second, bad = rows_of(tmp_path, objects, **given)
    with ChatRenderer(tokenizer) as renderer:
        texts = [renderer.render(row.messages or [], row.template_kwargs) for row in (first, second)]
    assert texts == ["a|False|1", "b|False|0"]
    assert bad.error is not None
    assert "(dataset.tools_field) is text, not a list of objects" in bad.error


def test_the_digest_sees_what_a_template_gets_and_a_row_without_any_keeps_its_own(tmp_path: Path) -> None:
    def digest(given: Mapping[str, object] | None, **fields: object) -> str:
        keys = {"chat_template": True, "tools_field": "t", "chat_template_kwargs": given}
        return input_digest(rows_of(tmp_path, [{"prompt": "a", "t": None, **fields}], **keys))

    plain = input_digest(rows_of(tmp_path, [{"prompt": "a", "t": None}], chat_template=True))
    assert digest(None) == digest({}) == plain
    assert len({plain, digest({"x": True}), digest({"x": False}), digest(None, t=[{"a": 1}])}) == 4
