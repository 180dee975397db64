"""The model in its forms, one after the other, each deleted before the next is made."""

import shutil
from pathlib import Path

import pytest

from benchmarks import larger_than_memory
from benchmarks.config import BenchConfig, Form, LargerConfig, Suite
from benchmarks.contenders import Contender
from benchmarks.measure import measure
from benchmarks.runner import gguf_path
from benchmarks.suites import run_suite
from benchmarks.task import BenchmarkTask, Result
from runtime.errors import ConfigError, WeightstreamError

SMALL = {
    "vocab_size": 640, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FORMS = [Form.published, Form.lossless, Form.int4]


def config(folder: Path | None, **settings: object) -> BenchConfig:
    values = {"num_layers": 2, "host_memory_gib": 1.0, "forms": FORMS, "peers": [], "architecture": SMALL}
    larger = LargerConfig(**{**values, **settings}, directory=folder and str(folder))  # pyright: ignore[reportArgumentType]
    return BenchConfig(suite=Suite.larger_than_memory, num_prompts=3, num_new_tokens=3, rounds=1, larger=larger)


def result(task: BenchmarkTask) -> Result:
    tokens = [[1, 2, 3]] * task.num_prompts
    return Result(
        seconds=3.0, prefill_seconds=1.0, rate=3.0, peak_bytes=0, baseline_bytes=0, bytes_read=0, tokens=tokens
    )


def test_each_form_is_generated_from_and_gone_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    there = list[list[str]]()

    def measured(task: BenchmarkTask) -> Result:
        assert task.host_memory_gib == 1.0
        there.append(sorted(path.name for path in Path(task.path).parent.iterdir()))
        return measure(task)

    done = run_suite(config(None), [], lambda _: None, measured)
    assert there == [["published"], ["lossless", "published"], ["int4", "published"]]
    assert not list(tmp_path.glob("larger-*"))
    published, lossless, _ = (line.split(" | ") for line in done.table.splitlines()[2:])
    assert published[2:3] == ["exact"]
    assert lossless[2:3] == ["lossless"]
    assert lossless[-1] == "3 of 3 |"


def test_a_named_directory_keeps_the_model_and_forms_that_were_there(tmp_path: Path) -> None:
    said = list[str]()
    run_suite(config(tmp_path), [], said.append, result)
    assert sum(line.startswith(("packing", "synthesizing")) for line in said) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["published"]
    (tmp_path / "int4").mkdir()
    (tmp_path / "int4" / "config.json").write_text("{}")
    done = run_suite(config(tmp_path), [], said.append, result)
    assert sum(line.startswith(("packing", "synthesizing")) for line in said) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["int4", "published"]
    assert "| 3.00 (3.00-3.00) | 1.00 | 3 |" in done.table


def test_a_disk_without_room_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=12 << 20)
    monkeypatch.setattr(larger_than_memory.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(WeightstreamError, match=r"has 12 MiB free, the model takes 5.89 GiB: .*larger.num_layers"):
        run_suite(config(tmp_path, architecture={}), [], lambda _: None, result)
    peers = [Contender.llama_cpp_mmap_q8_0]

    def failing(task: BenchmarkTask) -> Result:
        if task.contender in {peer.value for peer in peers}:
            raise WeightstreamError("it cannot run")
        return result(task)

    done = run_suite(config(tmp_path, forms=[Form.published], peers=peers), [], lambda _: None, failing)
    assert "llama_cpp_mmap_q8_0 is left out: it cannot run" in done.table


def test_a_peers_own_copy_that_is_there_needs_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Contender.llama_cpp_mmap_f16
    settings = config(tmp_path, forms=[Form.published], peers=[peer])

    def said_of_the_peer(free: int) -> str:
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(larger_than_memory.shutil, "disk_usage", lambda _: usage)
        return run_suite(settings, [], lambda _: None, failing).table

    def failing(task: BenchmarkTask) -> Result:
        if task.contender == peer.value:
            raise WeightstreamError("it cannot run")
        return result(task)

    assert "it cannot run" in said_of_the_peer(1 << 40)
    assert "free, llama_cpp_mmap_f16's own copy takes" in said_of_the_peer(0)
    copy = gguf_path(tmp_path / "published", "F16")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.touch()
    assert "it cannot run" in said_of_the_peer(0)


def test_settings_that_say_nothing_are_refused() -> None:
    for settings, why in (({"peers": [Contender.nvme]}, "must be peers, got nvme"), ({"forms": []}, "forms is empty")):
        with pytest.raises(ConfigError, match=why):
            LargerConfig(**settings)
