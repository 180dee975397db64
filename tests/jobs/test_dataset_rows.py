import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.datasets import (
    DatasetConfig,
    DatasetKind,
    DuplicatePolicy,
    Row,
    ShardConfig,
    input_digest,
    read_rows,
    shard_rows,
)
from runtime.errors import DatasetError


def write_lines(path, objects):
    path.write_text("".join(json.dumps(item) + "\n" for item in objects))
    return str(path)


def config_of(path, **settings):
    return DatasetConfig(kind=DatasetKind.jsonl, path=path, **settings)


def row(row_id="a", prompt="p", messages=None, columns=None, error=None, index=0):
    return Row(index=index, id=row_id, prompt=prompt, messages=messages, columns=columns or {}, error=error)


@pytest.fixture
def prompts(tmp_path):
    return write_lines(tmp_path / "in.jsonl", [{"id": f"r{number}", "prompt": f"p{number}"} for number in range(7)])


def test_limit_comes_before_repeat_and_replicas_have_their_own_ids(prompts):
    rows = read_rows(config_of(prompts, id_field="id", limit=2, repeat=3))
    assert [row.id for row in rows] == ["r0", "r1", "r0#1", "r1#1", "r0#2", "r1#2"]
    assert [row.prompt for row in rows] == ["p0", "p1"] * 3
    assert [row.index for row in rows] == list(range(6))


def test_without_an_id_field_the_id_is_the_row_number(prompts):
    assert [row.id for row in read_rows(config_of(prompts))] == [str(number) for number in range(7)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_shards_partition_the_rows(prompts, count):
    rows = read_rows(config_of(prompts))
    shards = [shard_rows(rows, ShardConfig(index=index, count=count)) for index in range(count)]
    assert sorted((row for shard in shards for row in shard), key=lambda row: row.index) == rows
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_duplicate_ids_are_refused_with_the_first_ten(tmp_path):
    objects = [{"id": number // 2, "prompt": "p"} for number in range(24)] + [{"id": 0, "prompt": "p"}]
    path = write_lines(tmp_path / "in.jsonl", objects)
    with pytest.raises(DatasetError, match=r"^12 ids .*13 rows too many.*'0' x3, '1' x2.*'9' x2 \.\.\..*dedupe=first"):
        read_rows(config_of(path, id_field="id"))


def test_a_replica_id_that_collides_with_a_real_id_is_a_duplicate(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"id": "a", "prompt": "p"}, {"id": "a#1", "prompt": "p"}])
    with pytest.raises(DatasetError, match="'a#1' x2"):
        read_rows(config_of(path, id_field="id", repeat=2))


def test_dedupe_first_keeps_the_first_and_renumbers(tmp_path, caplog):
    objects = [{"id": row_id, "prompt": f"p{n}"} for n, row_id in enumerate("abacb")]
    path = write_lines(tmp_path / "in.jsonl", objects)
    rows = read_rows(config_of(path, id_field="id", dedupe=DuplicatePolicy.first))
    assert [(row.index, row.id, row.prompt) for row in rows] == [(0, "a", "p0"), (1, "b", "p1"), (2, "c", "p3")]
    assert "2 rows dropped" in caplog.text


def test_a_huge_or_hostile_id_is_quoted_and_cut_in_messages(tmp_path):
    objects = [{"id": "x\x1b[31m" + "y" * 10_000, "prompt": "p"}] * 2
    with pytest.raises(DatasetError) as caught:
        read_rows(config_of(write_lines(tmp_path / "in.jsonl", objects), id_field="id"))
    assert len(str(caught.value)) < 500
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "other",
    [
        [row("b")],
        [row(prompt="q")],
        [row(messages=[{"role": "user", "content": "p"}])],
        [row(error="broken")],
        [row(), row("b")],
        [],
    ],
)
def test_the_digest_sees_what_can_change_text(other):
    assert input_digest(other) != input_digest([row()])


def test_the_digest_is_blind_to_columns_wording_and_is_fixed_for_ever():
    assert input_digest([row(columns={"a": 1})]) == input_digest([row()])
    assert input_digest([row(error="one")]) == input_digest([row(error="another")])
    fixed = [row("é", "naïve\n"), row("b", "", [{"role": "user", "content": "☃"}])]
    assert input_digest(fixed) == "f7d09296f295a881cffd0182e67ae3550bc2c3232c47266a8fcae7237513d0b3"


def test_the_digest_is_over_boundaries_not_concatenations():
    assert input_digest([row("ab", "c")]) != input_digest([row("a", "bc")])


CHAT = [{"role": "user", "content": "hi"}]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("fields", "settings", "messages"),
    [
        ({"prompt": "hi"}, {}, None),
        ({"prompt": "hi"}, {"chat_template": True}, CHAT),
        ({"prompt": "hi"}, {"chat_template": True, "system_prompt": "Be brief."}, [SYSTEM, *CHAT]),
        ({"chat": CHAT}, {"chat_template": True, "messages_field": "chat"}, CHAT),
        (
            {"chat": CHAT},
            {"chat_template": True, "messages_field": "chat", "system_prompt": "Be brief."},
            [SYSTEM, *CHAT],
        ),
        (
            {"chat": [{"role": "system", "content": ""}, *CHAT]},
            {"chat_template": True, "messages_field": "chat", "system_prompt": "Be brief."},
            [{"role": "system", "content": ""}, *CHAT],
        ),
    ],
)
def test_messages_are_there_exactly_when_a_template_is_to_be_applied(tmp_path, fields, settings, messages):
    (read,) = read_rows(config_of(write_lines(tmp_path / "in.jsonl", [fields]), **settings))
    assert read.error is None
    assert read.messages == messages


@pytest.mark.parametrize(
    "chat", ["hi", [], [1], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": 1, "content": "x"}]]
)
def test_a_broken_chat_is_an_error_row(tmp_path, chat):
    path = write_lines(tmp_path / "in.jsonl", [{"chat": chat}])
    (read,) = read_rows(config_of(path, chat_template=True, messages_field="chat"))
    assert read.error is not None
    assert "'chat'" in read.error


FUNCTION = {"name": "f"}
SHAREGPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]
READ_CHATS = {
    "WildChat's keys": (
        [{**CHAT[0], "toxic": False, "turn": 3, "header": {"agent": "x\\u0000"}, "at": None}],
        [{**CHAT[0], "toxic": False, "turn": 3, "header": {"agent": "x\\u0000"}}],
    ),
    "an answer replayed": (
        [{"role": "assistant", "content": "a", "annotations": [], "refusal": None}, *CHAT],
        [{"role": "assistant", "content": "a", "annotations": []}, *CHAT],
    ),
    "weights": ([{**CHAT[0], "weight": 0.5}], [{**CHAT[0], "weight": 0.5}]),
    "ShareGPT's form": (
        SHAREGPT,
        [{"role": "system", "content": "s"}, {"role": "user", "content": "h"}, {"role": "assistant", "content": "g"}],
    ),
    "ShareGPT's form with more keys": (
        [{"from": "human", "value": "h", "weight": 1}, {"from": "observation", "value": "o"}],
        [{"weight": 1, "role": "user", "content": "h"}, {"role": "tool", "content": "o"}],
    ),
    "JSON in a text": (json.dumps(CHAT), CHAT),
    "ShareGPT's form in a text": (json.dumps(SHAREGPT[1:2]), [{"role": "user", "content": "h"}]),
}


@pytest.mark.parametrize(("chat", "messages"), READ_CHATS.values(), ids=READ_CHATS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_chat_is_read_as_people_have_it(tmp_path, kind, chat, messages):
    path = write_lines(tmp_path / "in.jsonl", [{"chat": chat}])
    if kind == "parquet":
        if isinstance(chat, list):  # a table has every key in every message
            chat = [{key: message.get(key) for key in {key for each in chat for key in each}} for message in chat]
        path = tmp_path / "in.parquet"
        pq.write_table(pa.Table.from_pylist([{"chat": chat}]), path)
    settings = {"chat_template": True, "messages_field": "chat"}
    (read,) = read_rows(DatasetConfig(kind=DatasetKind[kind], path=str(path), **settings))
    assert (read.error, read.messages) == (None, messages)


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"arguments": '{"a": 1}'}, {"a": 1}),
        ({"arguments": {"a": 1}}, {"a": 1}),
        *(({"arguments": nothing}, {}) for nothing in ("", "\n", "null", '""', None, {})),
        ({}, {}),
        ({"arguments": '"UTC"'}, "UTC"),
        ({"arguments": "[1]"}, [1]),
    ],
    ids=str,
)
def test_arguments_of_a_call_are_objects_and_none_at_all_is_an_empty_one(tmp_path, given, arguments):
    calls = [{"type": "function", "function": {**FUNCTION, **given}}]
    path = write_lines(tmp_path / "in.jsonl", [{"chat": [*CHAT, {"role": "assistant", "tool_calls": calls}]}])
    (read,) = read_rows(config_of(path, chat_template=True, messages_field="chat"))
    assert read.error is None
    (call,) = read.messages[1]["tool_calls"]
    assert call == {"type": "function", "function": {**FUNCTION, "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"from": "narrator", "value": "x"}, "message 1 of 'chat' is from 'narrator'; known: human, user, gpt"),
        ({"from": ["human"], "value": "x"}, "is from \"['human']\""),
        ({"from": "human", "value": None}, "'content' of message 1 of 'chat' is null"),
        ({"role": "user", "content": "x", "more": {"a": ["\0"]}}, "'more' of message 1 of 'chat' has a NUL"),
        *(
            ({"role": "assistant", "tool_calls": [{"function": {**FUNCTION, "arguments": arguments}}]}, why)
            for arguments, why in (
                ("{a: 1}", "the arguments of tool_calls of message 1 of 'chat': not JSON"),
                ("[" * 900 + "]" * 900, "nested deeper than 100 levels"),
                ('{"a": "\\ud800"}', "lone surrogate"),
                ('{"a": 1' + "0" * 5000 + "}", "limit"),
            )
        ),
    ],
)
def test_a_message_that_cannot_be_read_costs_its_row_and_is_named(tmp_path, message, why):
    path = write_lines(tmp_path / "in.jsonl", [{"chat": [*CHAT, message]}, {"chat": CHAT}])
    bad, good = read_rows(config_of(path, chat_template=True, messages_field="chat"))
    assert good.error is None
    assert why in bad.error


def test_columns_are_all_fields_but_the_id_or_none(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"id": 1, "prompt": "p", "tags": ["x", None]}])
    assert read_rows(config_of(path, id_field="id"))[0].columns == {"prompt": "p", "tags": ["x", None]}
    assert read_rows(config_of(path, id_field="id", keep_columns=False))[0].columns == {}


def test_a_field_that_no_row_has_is_a_mistyped_setting_and_refused_one_that_some_lack_is_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n{"question": "b"}\n')
    config = DatasetConfig(kind=DatasetKind.jsonl, path=str(path), prompt_field="prompt")
    with pytest.raises(DatasetError, match=r"^no row has the field 'prompt' \(2 rows\); .*its fields: 'question'"):
        read_rows(config)
    path.write_text('{"question": "a"}\n{"prompt": "b"}\n')
    assert [row.error is None for row in read_rows(config)] == [False, True]
