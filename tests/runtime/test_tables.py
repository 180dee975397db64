"""Tables of prompts: columns in, columns behind them out, a row for each row."""

import pyarrow as pa
import pytest

from runtime import Prompt, Runtime
from runtime.errors import ConfigError
from runtime.library.columns import result_schema
from runtime.library.tables import TableColumns

CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))


def texts(*values: str | None) -> pa.Table:
    return pa.table({"number": pa.array(range(len(values)), pa.int64()), "prompt": pa.array(values, pa.string())})


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(model="tiny", max_new_tokens=4)


def test_rows_keep_their_places_and_columns_and_results_are_those_of_generate(runtime: Runtime) -> None:
    table = texts("Sort these numbers: 2 1", "Q: 3", "Reverse: a b")
    found = runtime.generate_table(table)
    results = runtime.generate(table["prompt"].to_pylist())
    assert found.select(table.schema.names) == table
    assert found.schema.names == [*table.schema.names, *result_schema(runtime.config.sampling).names]
    assert found["token_ids"].to_pylist() == [list(each.token_ids) for each in results]
    assert found["completion"].to_pylist() == [each.text for each in results]
    assert found["status"].to_pylist() == ["ok"] * 3
    assert found["num_prompt_tokens"].to_pylist() == [each.num_prompt_tokens for each in results]
    assert found["finish_reason"].to_pylist() == [each.finish.value for each in results]


def test_a_bad_row_is_an_error_row_and_costs_no_other(runtime: Runtime) -> None:
    table = texts("good", None, "", "x " * 5000).append_column("limit", pa.array([2, 2, 2, -1]))
    found = runtime.generate_table(table, overrides={"max_new_tokens": "limit"})
    assert found["status"].to_pylist() == ["ok", "error", "error", "error"]
    errors = found["error"].to_pylist()
    assert errors[:3] == [None, "the prompt is null", "the prompt is empty"]
    assert "max_new_tokens" in errors[3]
    assert found["num_completion_tokens"].to_pylist() == [2, 0, 0, 0]


def test_a_table_of_bad_rows_alone_and_an_empty_one_have_the_same_columns(runtime: Runtime) -> None:
    broken, empty = runtime.generate_table(texts(None, None)), runtime.generate_table(texts())
    assert broken["status"].to_pylist() == ["error", "error"]
    assert (empty.num_rows, empty.schema) == (0, broken.schema)


def test_token_ids_and_what_rows_say_for_themselves_are_those_of_prompts(runtime: Runtime) -> None:
    kinds = {"ids": pa.large_list(pa.int32()), "heat": pa.float32(), "seed": pa.int64(), "stop": pa.string()}
    rows = [{"ids": [5, 6, 7], "heat": 0.8, "seed": 3}, {"ids": [8, 9]}, {"ids": [5, None]}]
    table = pa.Table.from_pylist(rows, schema=pa.schema(list(kinds.items())))
    overrides = {"temperature": "heat", "seed": "seed", "stop": "stop"}
    found = runtime.generate_table(table, prompt="ids", overrides=overrides)
    heat = table["heat"][0].as_py()
    expected = runtime.generate([Prompt(token_ids=[5, 6, 7], temperature=heat, seed=3), Prompt(token_ids=[8, 9])])
    assert found["token_ids"].to_pylist()[:2] == [list(each.token_ids) for each in expected]
    assert found["error"].to_pylist()[2] == "token id 1 of the prompt is null"


def test_draws_follow_from_the_column_of_ids_wherever_a_row_stands() -> None:
    runtime = Runtime(model="tiny", max_new_tokens=8, temperature=1.0)
    rows = [{"key": number, "prompt": "Once"} for number in range(3)]
    forward = runtime.generate_table(pa.Table.from_pylist(rows), id="key")
    back = runtime.generate_table(pa.Table.from_pylist(rows[::-1]), id="key")
    assert forward["token_ids"].to_pylist() == back["token_ids"].to_pylist()[::-1]
    assert len({tuple(ids) for ids in forward["token_ids"].to_pylist()}) > 1


def test_messages_lose_the_keys_that_only_others_have() -> None:
    chats = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": None}], [{"role": None, "content": "x"}]]
    [chat, no_content, no_role] = TableColumns().read_prompts(pa.table({"prompt": pa.array(chats, CHAT)}))
    assert chat == Prompt(messages=[{"role": "user", "content": "Hi"}], id="0")
    assert getattr(no_content, "error", None) == "message 0 of the prompt has no text 'content'"
    assert getattr(no_role, "error", None) == "message 0 of the prompt has no text 'role'"


def test_columns_of_results_follow_the_settings() -> None:
    runtime = Runtime(model="tiny", max_new_tokens=3, logprobs=2)
    found = runtime.generate_table(texts("One"), prefix="new_")
    assert found.schema.names[-3:] == ["new_logprobs", "new_top_token_ids", "new_top_logprobs"]
    assert [len(each) for each in found["new_top_logprobs"].to_pylist()[0]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("table", "settings", "said"),
    [
        (pa.table({"promt": ["a"]}), {}, "no column 'prompt'; its columns: 'promt': did you mean promt"),
        (pa.table({"prompt": [1]}), {}, "'prompt' holds int64: a prompt is a text, a list of token ids"),
        (pa.table({"prompt": ["a"], "status": [1]}), {}, "has result columns .*'status': rename them, or set prefix"),
        (pa.table({"prompt": ["a"]}), {"overrides": {"max_new_token": "prompt"}}, "did you mean max_new_tokens"),
        (pa.table({"prompt": ["a"]}), {"overrides": {"seed": "prompt"}}, "holds string: seed must be whole numbers"),
        (pa.table({"prompt": ["a"], "id": [0.5]}), {"id": "id"}, "'id' holds double: ids are texts or whole numbers"),
        (pa.table([["a"], ["b"]], ["prompt", "prompt"]), {}, "has 2 columns 'prompt'"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_before_anything_is_generated(
    table: pa.Table, settings: dict, said: str, runtime: Runtime
) -> None:
    with pytest.raises(ConfigError, match=said):
        runtime.generate_table(table, **settings)


def test_a_table_has_one_row_out_for_each_row_in() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.n=2: a table gets one result per row"):
        Runtime(model="tiny", n=2, temperature=1.0).generate_table(texts("a"))
