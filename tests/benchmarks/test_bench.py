"""Contenders get the same prompts and give the same tokens; the table has a row for each. Speed is not asserted."""

import io
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import reading
from benchmarks.config import BenchConfig, make_task
from benchmarks.contenders import CONTENDERS, AttentionBaseline, Contender, OwnContender, Peer, ReadBaseline
from benchmarks.measure import measure
from benchmarks.report import speed_table
from benchmarks.runner import format_failure
from benchmarks.task import BenchmarkTask, Result, random_prompts
from benchmarks.weightstream import open_runtime
from benchmarks.worker import respond
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import DType, ModelConfig, OffloadConfig, Order
from runtime.errors import ConfigError
from runtime.units import MIB
from tests.dealt import with_slow_others

GENERATING = [
    contender
    for contender, entry in CONTENDERS.items()
    if isinstance(entry, OwnContender | Peer) and entry.dtype is DType.float32
    if isinstance(entry, OwnContender) or entry.isolation is None
]
IN_BFLOAT16 = [
    contender
    for contender, entry in CONTENDERS.items()
    if isinstance(entry, OwnContender) and entry.dtype is DType.bfloat16
]
READING = [contender for contender, entry in CONTENDERS.items() if isinstance(entry, ReadBaseline)]
SWEEPING = [contender for contender, entry in CONTENDERS.items() if isinstance(entry, AttentionBaseline)]


def task_for(contender: Contender, path: Path | None = None) -> BenchmarkTask:
    entry = CONTENDERS[contender]
    return BenchmarkTask(
        contender=contender.value,
        path=str(path or find_checkpoint(ModelConfig(), None)),
        num_prompts=5,
        prompt_tokens=60,
        num_new_tokens=4,
        ignore_eos=True,
        batch_size=2 if isinstance(entry, Peer) else None,
        micro_batch_size=3,
        num_micro_batches=2,
        weight_share=60.0,
        num_threads=2,
        schedule=(entry.schedule if isinstance(entry, OwnContender) else Order.zigzag).value,
    )


def measured(contender: Contender, path: Path | None = None) -> Result:
    return measure(task_for(contender, path))


def measured_nothing() -> Result:
    return Result(seconds=1.0, prefill_seconds=0.0, rate=1.0, peak_bytes=0, baseline_bytes=0, bytes_read=0, tokens=[])


def test_every_contender_generates_the_same_tokens_and_has_its_row() -> None:
    pytest.importorskip("accelerate")
    rounds = {contender.value: [measured(contender)] for contender in GENERATING}
    expected = rounds["transformers"][0].tokens
    assert [len(tokens) for tokens in expected] == [4] * 5
    assert all(results[0].tokens == expected for results in rounds.values())
    table = speed_table(rounds)
    assert all(f"| {name} |" in table for name in rounds)
    assert table.count("5 of 5") == len(rounds)


@pytest.mark.slow("benchmarks/test_bench.py::test_every_contender_generates_the_same_tokens_and_has_its_row")
@pytest.mark.parametrize("contender", IN_BFLOAT16)
def test_ours_in_bfloat16_computes_in_bfloat16(contender: Contender) -> None:
    runtime, _ = open_runtime(task_for(contender), OffloadConfig())
    assert runtime.model.compute_dtype is torch.bfloat16
    assert [len(tokens) for tokens in measured(contender).tokens] == [4] * 5


@pytest.mark.parametrize("contender", READING)
def test_reading_contenders_read_the_streamed_layers_in_every_pass(contender: Contender) -> None:
    result = measured(contender)
    assert result.bytes_read > 0
    assert result.tokens == []


@pytest.mark.parametrize("contender", with_slow_others(SWEEPING, SWEEPING[:1]))
def test_sweeping_contenders_go_over_more_than_a_cache_holds_as_often_as_they_say(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "NUM_PAGES", 64)
    monkeypatch.setattr(reading, "NUM_ROWS", 2)
    monkeypatch.setattr(reading, "SWEPT_BYTES", 24 * MIB)
    result = measured(contender)
    assert result.bytes_read == reading.NUM_SWEEPS * 24 * MIB
    assert result.rate == pytest.approx(result.bytes_read / result.seconds)
    assert result.tokens == []


def test_attention_is_set_beside_a_link_on_paper() -> None:
    result = replace(measured_nothing(), rate=32e9)
    table = speed_table({"memory_read": [result], "attention_bfloat16": [result]})
    assert "| attention_bfloat16 | 128 MiB | 4.2 ms | 8.4 ms | 2.00 |" in table
    assert "computed" not in speed_table({"memory_read": [result]})


def test_a_model_as_small_as_the_default_has_the_least_memory_that_its_weights_can_stream_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A quarter of its weights would not even hold what a run works with."""
    contenders = (Contender.nvme, Contender.none)
    config = BenchConfig(num_prompts=5, num_new_tokens=4)
    tasks = [make_task(config, each, str(find_checkpoint(ModelConfig(), None)), 5) for each in contenders]
    streamed, resident = (measure(task) for task in tasks)
    assert streamed.tokens == resident.tokens
    assert [len(tokens) for tokens in streamed.tokens] == [4] * 5
    assert "nvme: weight_share=0.25 is" in capsys.readouterr().err


def test_a_worker_that_cannot_run_says_why_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = replace(make_task(BenchConfig(), Contender.none, str(tmp_path), 5), is_check=True)
    with pytest.raises(SystemExit) as ended:
        respond(["benchmarks.measure", json.dumps(asdict(task))], io.StringIO())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}")
    assert "Traceback" not in said


def test_what_a_refused_worker_says_last_is_told_in_one_line() -> None:
    said = "WARNING error: of no matter\nerror: the run needs 2 GiB more\nhost memory:\n  total  9 GiB > 7 GiB\n"
    why = format_failure(2, said)
    assert why == "cannot run: the run needs 2 GiB more; host memory:; total  9 GiB > 7 GiB"
    odd = "an error: of no matter\nValueError: odd\n"
    assert format_failure(1, odd) == "failed with exit code 1: ValueError: odd"


def test_every_contender_is_in_the_table_and_finding_out_what_it_is_loads_no_torch() -> None:
    assert set(CONTENDERS) == set(Contender)
    program = "import sys, benchmarks.contenders as c; print(len(c.CONTENDERS), 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(len(Contender)), "False"]


def test_peers_generate_past_the_end_of_sequence_token(tmp_path: Path) -> None:
    expected = measured(Contender.transformers)
    path = tmp_path / "tiny"
    shutil.copytree(find_checkpoint(ModelConfig(), None), path)
    settings = json.loads((path / "generation_config.json").read_text())
    first = sorted({tokens[0] for tokens in expected.tokens})
    (path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": first}))
    assert measured(Contender.transformers, path).tokens == expected.tokens


def test_prompts_are_the_same_every_time_and_within_the_vocabulary() -> None:
    ids = random_prompts(64, 32_000, 60)
    assert ids == random_prompts(64, 32_000, 60)
    assert sum(map(len, ids)) == 4_606
    assert all(10 <= token < 31_990 for prompt in ids for token in prompt)


def test_impossible_settings_name_the_key() -> None:
    with pytest.raises(ConfigError, match="rounds"):
        BenchConfig(rounds=0)
    with pytest.raises(ConfigError, match="ignore_eos=false"):
        BenchConfig(ignore_eos=False, contenders=[Contender.none, Contender.transformers])
