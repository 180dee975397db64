"""Prompts that begin alike: the same for all contenders, fewer for some, under one budget."""

import json
from pathlib import Path

import pytest

from benchmarks.config import BenchConfig, Suite
from benchmarks.contenders import Contender
from benchmarks.measure import measure
from benchmarks.prefixes import few_shot_prompts, prefixes_table
from benchmarks.suites import run_suite
from benchmarks.task import BenchmarkTask, Result, task_prompts
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import ModelConfig
from runtime.errors import ConfigError, WeightstreamError

PATH = str(find_checkpoint(ModelConfig(), None))
OURS = [Contender.nvme, Contender.nvme_unshared]


def config(**settings: object) -> BenchConfig:
    usual = {"suite": Suite.prefixes, "contenders": OURS, "num_prompts": 12, "num_new_tokens": 2, "rounds": 1}
    return BenchConfig(**{**usual, **settings})  # pyright: ignore[reportArgumentType]


def result(task: BenchmarkTask) -> Result:
    rows = task_prompts(task, 0)
    return Result(
        seconds=2.0, prefill_seconds=1.0, rate=len(rows), peak_bytes=0, baseline_bytes=0, bytes_read=0, tokens=rows,
        predicted_prefill_seconds=1.0, predicted_decode_seconds=0.5, num_block_rows=3,
    )  # fmt: skip


def texts(count: int) -> list[tuple[str, str]]:
    return [(f"what is {number}", f"it is {number}") for number in range(count)]


def written(folder: Path, count: int) -> str:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in texts(count)))
    return str(file)


def test_all_contenders_get_the_same_prompts_some_of_them_fewer() -> None:
    asked = list[BenchmarkTask]()

    def measured(task: BenchmarkTask) -> Result:
        asked.append(task)
        return result(task)

    done = run_suite(config(rows={Contender.nvme_unshared: 5}, rounds=2), [PATH], lambda _: None, measured)
    assert [task.contender for task in asked] == ["nvme", "nvme_unshared"] * 2
    first, second = (done.rounds[each.value][0].tokens for each in OURS)
    assert (len(first), len(second)) == (12, 5)
    assert first[:5] == second
    rows = done.table.splitlines()[2:]
    assert "| nvme | 12 | 3 | 1.5 s | 2.0 s (2.0-2.0) | +33% | 6.000 |" in rows[0]
    assert "| 5 of 5 |" in rows[1]


def test_a_peer_that_cannot_run_is_left_out_and_the_table_says_why() -> None:
    def measured(task: BenchmarkTask) -> Result:
        if task.contender == "vllm":
            raise WeightstreamError("vllm cannot be installed")
        return result(task)

    done = run_suite(config(contenders=[Contender.nvme, Contender.vllm]), [PATH], lambda _: None, measured)
    assert "vllm is left out: vllm cannot be installed" in done.table
    assert list(done.rounds) == ["nvme"]


def test_questions_of_a_file_stand_behind_its_first_ones(tmp_path: Path) -> None:
    file = written(tmp_path, 11)
    done = run_suite(config(num_prompts=3, questions=file), [PATH], lambda _: None, result)
    assert len(done.rounds["nvme"][0].tokens) == 3
    prompts = list(few_shot_prompts(texts(11), 8))
    assert [prompt.count("Question:") for prompt in prompts] == [9] * 3
    assert prompts[0].endswith("Answer: it is 7\n\nQuestion: what is 8\nAnswer:")
    with pytest.raises(ConfigError, match="has 11 rows, 8 of them used as examples: num_prompts must be 3 or less"):
        run_suite(config(num_prompts=4, questions=file), [PATH], lambda _: None, result)


def test_shared_rows_have_the_same_tokens_in_larger_blocks_under_the_same_budget(tmp_path: Path) -> None:
    file = written(tmp_path, 20)
    done = run_suite(config(kv_seats=4, questions=file), [PATH], lambda _: None, measure)
    shared, alone = (done.rounds[each.value][0] for each in OURS)
    assert shared.tokens == alone.tokens
    assert shared.num_block_rows > alone.num_block_rows
    assert shared.num_prompt_tokens < alone.num_prompt_tokens / 2
    assert prefixes_table(done.rounds).count("12 of 12") == 2


def test_prompts_that_do_not_fit_the_model_are_refused_with_their_number() -> None:
    with pytest.raises(WeightstreamError, match="12 of 12 prompts exceed the model"):
        run_suite(config(), [PATH], lambda _: None, measure)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rows": {Contender.nvme: 13}}, "rows must be 1 to num_prompts=12, got nvme: 13"),
        (
            {"contenders": [Contender.none]},
            "contenders: suite=prefixes allows nvme, nvme_continuous, nvme_unshared, vllm",
        ),
        ({"kv_seats": 0}, "kv_seats must be 1 or more"),
    ],
)
def test_what_it_cannot_do_is_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config(**settings)
