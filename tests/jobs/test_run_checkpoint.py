"""The checkpoint gives back what was saved, or nothing and a warning: never other tokens, never an error."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.record import run_checkpoint as running
from jobs.record.output_rows import GenerationRow
from jobs.record.run_checkpoint import RunCheckpoint, RunCheckpointFile
from jobs.record.run_dir import RunDirectory
from runtime.sequences.sequence import SequenceState, TokenLogprobs
from tests.jobs.part_support import MANIFEST, PASSES, PLAN

FINISHED = [
    GenerationRow(
        id="row 2",
        sample_index=1,
        status="ok",
        completion="text \ud800",
        token_ids=[1, 2],
        logprobs=[-0.5, -1.5],
        top_token_ids=[[1, 7], [2, 8]],
        top_logprobs=[[-0.5, -2.0], [-1.5, float("-inf")]],
        finish_reason="stop",
    ),
    GenerationRow(id="row 0", sample_index=0, status="error", error="NaN"),
]
UNFINISHED = {
    ("row 2", 0): SequenceState(
        token_ids=(4, 5),
        logprobs=(TokenLogprobs(own=-0.25, top_ids=(4,), top=(-0.25,)), TokenLogprobs(own=-3.0, top_ids=(), top=())),
        generator_state=b"\0\xff",
    ),
    ("row 4", 1): SequenceState(token_ids=(), logprobs=(), generator_state=None),
}
CHECKPOINT = RunCheckpoint(finished=FINISHED, unfinished=UNFINISHED, passes=PASSES)
NOTHING = RunCheckpoint(finished=[], unfinished={}, passes=[])


def file_at(path: Path) -> RunCheckpointFile:
    path.mkdir(exist_ok=True)
    return RunCheckpointFile(directory=RunDirectory(path=path), manifest=MANIFEST, plan=PLAN)


def plain(running: RunCheckpoint) -> tuple[object, ...]:
    return list(running.finished), dict(running.unfinished), list(running.passes)


def test_what_was_saved_last_comes_back(tmp_path: Path) -> None:
    file = file_at(tmp_path)
    assert plain(file.load()) == plain(NOTHING)
    assert file.save(NOTHING)
    assert file.save(CHECKPOINT)
    cleaned = [
        replace(FINISHED[0], completion="text \\ud800"),
        replace(FINISHED[1], token_ids=[], logprobs=[], top_token_ids=[], top_logprobs=[]),
    ]
    assert plain(file.load()) == plain(replace(CHECKPOINT, finished=cleaned))
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_bit_is_harmless_or_costs_the_checkpoint_alone(tmp_path: Path) -> None:
    file = file_at(tmp_path)
    file.save(CHECKPOINT)
    path = file.directory.run_checkpoint
    whole, expected = path.read_bytes(), plain(file.load())
    num_refused = 0
    for position in range(0, len(whole), 23):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        loaded = plain(file.load())
        assert loaded in (expected, plain(NOTHING)), position
        num_refused += loaded != expected
    assert num_refused > len(whole) / 23 / 4
    assert len(list(file.directory.quarantine.iterdir())) == num_refused


@pytest.mark.parametrize("spoil", ["cut", "empty", "text", "other run", "other plan"])
def test_a_file_that_is_not_this_runs_moves_to_quarantine(
    tmp_path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_at(tmp_path)
    others = {
        "other run": replace(file, manifest=replace(MANIFEST, semantic={"model.name": "other"})),
        "other plan": replace(file, plan=PLAN[1:]),
    }
    others.get(spoil, file).save(CHECKPOINT)
    path = file.directory.run_checkpoint
    damaged = {"cut": path.read_bytes()[:-9], "empty": b"", "text": b"hello"}.get(spoil, path.read_bytes())
    path.write_bytes(damaged)
    assert plain(file.load()) == plain(NOTHING)
    assert [kept.read_bytes() for kept in file.directory.quarantine.iterdir()] == [damaged]
    assert not path.exists()
    assert "its requests restart" in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_file_that_cannot_be_read_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    file = file_at(tmp_path)
    file.save(CHECKPOINT)

    def fail(_: Path) -> tuple[bytes, os.stat_result]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(running, "read_regular_file", fail)
    assert plain(file.load()) == plain(NOTHING)
    assert os.strerror(number) in caplog.text


def test_a_fault_while_saving_keeps_what_was_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_at(tmp_path)
    file.save(CHECKPOINT)
    before = file.directory.run_checkpoint.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    assert not file.save(NOTHING)
    assert file.directory.run_checkpoint.read_bytes() == before
    assert "ENOSPC" in caplog.text


def test_what_can_be_neither_used_nor_moved_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_at(tmp_path)
    file.directory.run_checkpoint.write_bytes(b"hello")

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rename", fail)
    assert plain(file.load()) == plain(NOTHING)
    assert "or moved to quarantine" in caplog.text
