"""Chats of several turns: each turn's prompts hold our answers to those before, however often the run was stopped."""

import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir

from jobs.config.settings import GenerateConfig, load, run_directory
from jobs.exporting.config import ExportConfig
from jobs.exporting.export import export
from jobs.pictures.trace_file import find_trace_files
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run.tasks.converse import run_turns
from jobs.run.tasks.generate import generate
from runtime.errors import ConfigError, Interrupted
from runtime.synthesize.tokenizer import byte_level_tokenizer
from tests.jobs.killing import start_job
from tests.jobs.rank_loop import end_of, free_port, rank_alone
from tests.processes import PROCESSES
from tests.support import Reference
from tests.tokenizer_kinds import tokenizer_of

CONF = Path(__file__).resolve().parents[2] / "conf"
TEMPLATE = (
    "{% for m in messages %}{% if 'refuse me' in m.content %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
Whole = tuple[GenerateConfig, list[Outcome]]
QUESTIONS: list[dict[str, object]] = [
    {"question_id": 81, "category": "writing", "turns": ["Say a word.", "And another."]},
    {"question_id": 82, "category": "writing", "turns": ["Only this."]},
    {"question_id": 83, "category": "math", "turns": ["Count.", "Go on.", "And on."]},
    {"question_id": 84, "category": "math", "turns": ["refuse me", "And then?"]},
    {"question_id": 85, "category": "math", "turns": ["What is it?", "Why is it?"]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, reference: Callable[[str], Reference]) -> str:
    directory = tmp_path_factory.mktemp("model")
    for file in reference("llama").directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tokenizer = byte_level_tokenizer(640)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return str(directory)


def words_for(folder: Path, model: str, run: str = "mine") -> list[str]:
    path = folder / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS), encoding="utf-8")
    settings = ["dataset=mtbench", f"dataset.path={path}", "dataset.turns=all", "dataset.chat_template=true"]
    settings += ["model=hf", f"model.path={model}", f"output_root={folder}", f"run={run}", "sampling.max_new_tokens=4"]
    fixed = ["policy=fixed", "policy.micro_batch_size=1", "policy.num_micro_batches=2", "offload=nvme"]
    return [*settings, *fixed]


def config_for(folder: Path, model: str, *words: str, run: str = "mine") -> GenerateConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return load(GenerateConfig, compose("generate", overrides=[*words_for(folder, model, run), *words]))


def never() -> bool:
    return False


def rows_of(config: GenerateConfig) -> dict[tuple[str, int], dict[str, Any]]:
    folders = sorted(run_directory(config).glob("turn-*/generations"))
    rows = [row for folder in folders for row in pq.read_table(folder).to_pylist()]
    return {(row["id"], row["turn"]): row for row in rows}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: str) -> Whole:
    """A run that nothing stopped, and what its turns came to."""
    config = config_for(tmp_path_factory.mktemp("whole"), model)
    return config, list(run_turns(config, never))


def test_each_turn_is_asked_behind_the_answers_to_those_before(tmp_path: Path, model: str, whole: Whole) -> None:
    rows, outcomes = rows_of(whole[0]), whole[1]
    assert sorted(rows) == [
        *(("81", 1), ("81", 2), ("82", 1), ("83", 1), ("83", 2), ("83", 3), ("84", 1), ("84", 2), ("85", 1), ("85", 2))
    ]
    chats = tmp_path / "chats.jsonl"
    said = [row["turns"] for row in QUESTIONS if row["question_id"] in (81, 83)]
    spoken = [["81", said[0], 2], ["83", said[1], 2], ["83", said[1], 3]]
    with chats.open("w") as file:
        for id, turns, turn in spoken:
            chat = [{"role": "user", "content": turns[0]}]
            for before in range(1, turn):
                chat += [{"role": "assistant", "content": rows[id, before]["completion"]}]
                chat += [{"role": "user", "content": turns[before]}]
            file.write(json.dumps({"id": f"{id}-{turn}", "chat": chat}) + "\n")
    words = ["dataset=jsonl", "dataset.turns=first", f"dataset.path={chats}", "dataset.messages_field=chat"]
    plain = config_for(tmp_path, model, *words, "dataset.id_field=id", run="plain")
    generate(plain, never)
    asked = pq.read_table(run_directory(plain) / "generations").to_pylist()
    assert {row["id"]: (row["num_prompt_tokens"], row["token_ids"]) for row in asked} == {
        f"{id}-{turn}": (rows[id, turn]["num_prompt_tokens"], rows[id, turn]["token_ids"]) for id, _, turn in spoken
    }
    assert [outcome.exit_code for outcome in outcomes] == [3, 3, 0]


def test_an_answer_goes_on_without_the_space_that_a_template_writes_itself(
    tmp_path: Path, reference: Callable[[str], Reference]
) -> None:
    model, tokenizer = tmp_path / "model", tokenizer_of("llama2")
    shutil.copytree(reference("llama").directory, model)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    config = config_for(tmp_path, str(model), "sampling.choice=[' yes']")
    list(run_turns(config, never))
    rows = rows_of(config)
    assert rows["81", 1]["completion"] == " yes"
    chat = [{"role": "user", "content": "Say a word."}, {"role": "assistant", "content": "yes"}]
    asked = tokenizer.apply_chat_template([*chat, {"role": "user", "content": "And another."}], return_dict=False)
    assert rows["81", 2]["num_prompt_tokens"] == len(asked)


def test_a_chat_whose_first_turn_failed_has_error_rows_behind_it(whole: Whole) -> None:
    first, second = (rows_of(whole[0])["84", turn] for turn in (1, 2))
    assert (first["status"], second["status"]) == ("error", "error")
    assert second["error"] == f"turn 1 has no answer: {first['error']}"


def stop_within(config: GenerateConfig, turn: int) -> Callable[[], bool]:
    return lambda: any((run_directory(config) / f"turn-{turn}" / "generations").glob("*.parquet"))


def test_a_run_stopped_in_its_second_turn_goes_on_to_the_same_rows(tmp_path: Path, model: str, whole: Whole) -> None:
    config = config_for(tmp_path, model)
    with pytest.raises(Interrupted):
        list(run_turns(config, stop_within(config, 2)))
    assert not (run_directory(config) / "turn-3").exists()
    first = {path: path.stat() for path in (run_directory(config) / "turn-1" / "generations").iterdir()}
    outcomes = list(run_turns(config, never))
    assert [outcome.was_finished for outcome in outcomes] == [True, False, False]
    assert {path: path.stat() for path in first} == first
    assert rows_of(config) == rows_of(whole[0])


def test_shards_ask_the_turns_of_their_own_rows(tmp_path: Path, model: str, whole: Whole) -> None:
    shards = [config_for(tmp_path, model, "shard.count=2", f"shard.index={index}") for index in (1, 0)]
    for shard in shards:
        list(run_turns(shard, never))
    apart = [rows_of(shard) for shard in shards]
    assert not apart[0].keys() & apart[1].keys()
    seen = ("completion", "token_ids", "error", "row_index", "category")
    assert {key: [row[name] for name in seen] for part in apart for key, row in part.items()} == {
        key: [row[name] for name in seen] for key, row in rows_of(whole[0]).items()
    }
    for run, out in ((str(run_directory(whole[0])), "whole"), (str(tmp_path / "generate" / "mine-*"), "shards")):
        columns = ["id", "turn", "completion"]
        export(ExportConfig(run=run, out=str(tmp_path / f"{out}.jsonl"), columns=columns))
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "shards.jsonl").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    assert [(line["id"], line["turn"]) for line in lines] == sorted(rows_of(whole[0]))


def test_an_export_says_which_turn_is_missing(tmp_path: Path, model: str) -> None:
    config = config_for(tmp_path, model)
    next(iter(run_turns(config, never)))
    with pytest.raises(ConfigError, match="turn 2 is missing; turn 3 is missing"):
        export(ExportConfig(run=str(run_directory(config)), out=str(tmp_path / "out.jsonl")))


@pytest.mark.slow("jobs/test_conversation.py::test_each_turn_is_asked_behind_the_answers_to_those_before")
def test_any_data_set_may_have_a_list_of_turns(tmp_path: Path, model: str, whole: Whole) -> None:
    words = ["dataset=jsonl", "dataset.turns=first", "dataset.turns_field=turns", "dataset.id_field=question_id"]
    list(run_turns(config := config_for(tmp_path, model, *words), never))
    found, wanted = rows_of(config), rows_of(whole[0])
    assert {key: row["token_ids"] for key, row in found.items()} == {
        key: row["token_ids"] for key, row in wanted.items()
    }


def test_a_column_called_turn_keeps_its_value_under_another_name(tmp_path: Path, model: str) -> None:
    words = ["dataset=jsonl", "dataset.turns=first", "dataset.turns_field=said"]
    config = config_for(tmp_path, model, *words)
    (tmp_path / "question.jsonl").write_text('{"said": ["Yes?", "No?"], "turn": "left"}\n', encoding="utf-8")
    list(run_turns(config, never))
    assert [(row["turn"], row["row_turn"]) for row in rows_of(config).values()] == [(1, "left"), (2, "left")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sampling={n: 2, temperature: 1}"], "sampling.n=2 .* dataset.repeat"),
        (["dataset.chat_template=false"], "dataset.turns=all needs dataset.chat_template=true"),
        (["dataset=jsonl"], "dataset.turns is not supported by dataset.kind=jsonl"),
        (
            ["dataset=jsonl", "dataset.turns=first", "dataset.turns_field=t", "dataset.messages_field=m"],
            "messages_field and dataset.turns_field",
        ),
        (
            ["dataset=jsonl", "dataset.turns=first", "dataset.turns_field=t", "dataset.template='{t}'"],
            "dataset.template and dataset.turns_field exclude each other",
        ),
    ],
)
def test_turns_that_cannot_be_asked_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_for(tmp_path, "model", *words)


def test_turns_are_not_put_into_a_run_that_asks_one(tmp_path: Path, model: str) -> None:
    one: Outcome = generate(config_for(tmp_path, model, "dataset.turns=first"), never)
    assert one.exit_code == 3
    with pytest.raises(ConfigError, match="contains a run with a single turn"):
        next(iter(run_turns(config_for(tmp_path, model), never)))


def begun_turn(config: GenerateConfig, turn: int, processes: Sequence[BaseProcess]) -> None:
    """Waits until a turn has begun, or all processes have ended."""
    manifest = RunDirectory(path=run_directory(config) / f"turn-{turn}").manifest
    while not manifest.exists() and any(each.is_alive() for each in processes):
        time.sleep(0.002)


@pytest.mark.slow("jobs/test_conversation.py::test_shards_ask_the_turns_of_their_own_rows")
def test_workers_share_out_each_turn_and_go_on_without_one_that_is_killed(
    tmp_path: Path, model: str, whole: Whole
) -> None:
    config = config_for(tmp_path, model, "workers=elastic")
    words = [*words_for(tmp_path, model), "workers=elastic", "lease_seconds=2", "log_level=warning"]
    killed = start_job(*words)
    begun_turn(config, 2, [killed])
    killed.kill()
    killed.join()
    first = {path: path.stat() for path in (run_directory(config) / "turn-1" / "generations").iterdir()}
    assert killed.exitcode == -signal.SIGKILL
    assert not (run_directory(config) / "turn-3").exists()
    workers = [start_job(*words, "trace=true") for _ in range(2)]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [3, 3]
    assert {path: path.stat() for path in first} == first
    assert rows_of(config) == rows_of(whole[0])
    assert [outcome.was_finished for outcome in run_turns(config, never)] == [True, True, True]
    traces = find_trace_files(run_directory(config))
    names = {path.stem.rpartition("-")[0] for path in traces}
    assert len({name.rpartition("-")[2] for name in names} & {str(worker.pid) for worker in workers}) >= 1


@pytest.mark.slow("jobs/test_conversation.py::test_shards_ask_the_turns_of_their_own_rows")
@pytest.mark.parametrize("way", ["sharded", "tensor", "pipeline"])
def test_ranks_come_to_the_turns_of_one_process(way: str, tmp_path: Path, model: str, whole: Whole) -> None:
    config = config_for(tmp_path, model)
    words = [*words_for(tmp_path, model), f"devices={way}", "log_level=warning"]

    def ranks() -> list[BaseProcess]:
        port = free_port()
        started = [PROCESSES.Process(target=rank_alone, args=(rank, 2, port, words, True)) for rank in range(2)]
        for each in started:
            each.start()
        return started

    if way == "sharded":
        stopped = ranks()
        begun_turn(config, 2, stopped)
        stopped[1].kill()
        assert end_of(stopped) == [75, -signal.SIGKILL]
        assert not (run_directory(config) / "turn-3").exists()
    assert end_of(ranks()) == [3, 0]
    seen = ("completion", "token_ids", "error", "row_index", "category", "num_prompt_tokens")
    assert {key: [row[name] for name in seen] for key, row in rows_of(config).items()} == {
        key: [row[name] for name in seen] for key, row in rows_of(whole[0]).items()
    }
    assert [outcome.was_finished for outcome in run_turns(config, never)] == [True, True, True]
