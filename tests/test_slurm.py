"""The script `generate` of `weightstream slurm`, run by bash with an `srun` and a `scontrol` that only write down how
they were called, and how the command prints the scripts."""

import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs import __main__ as command
from jobs.config.slurm import SCRIPTS, script_listing, script_text

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "/opt/my env/bin/python"


@dataclass(frozen=True, kw_only=True)
class FakeSlurm:
    folder: Path

    @property
    def script(self) -> Path:
        return self.folder / "generate.sbatch"

    def environment(self, **changes: str) -> dict[str, str]:
        task = {
            "SLURM_ARRAY_JOB_ID": "100",
            "SLURM_ARRAY_TASK_ID": "2",
            "SLURM_ARRAY_TASK_MAX": "3",
            "SLURM_JOB_ID": "100",  # what the last task of array 100 sees: its own id is that of the array
            "SLURM_SUBMIT_DIR": str(self.folder),
        }
        return {"PATH": f"{self.folder}:{os.environ['PATH']}", "LOG": str(self.folder), **task, **changes}

    def run(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", self.script, *arguments],
            env=self.environment(**changes),
            capture_output=True,
            text=True,
            timeout=20,
        )

    def calls(self, command: str) -> list[str]:
        log = self.folder / f"{command}.calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    commands = {
        "srun": 'printf "%s\\n" "$@" > "$LOG/srun.calls"; sleep "${STEP_SECONDS:-0}"; exit "${STEP_CODE:-0}"',
        "scontrol": 'echo "$@" >> "$LOG/scontrol.calls"',
    }
    for name, body in commands.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/bash\n{body}\n")
        command.chmod(0o755)
    (tmp_path / "generate.sbatch").write_text(script_text("generate", PYTHON))
    return FakeSlurm(folder=tmp_path)


def test_step_gets_the_settings_as_given_and_its_shard(slurm: FakeSlurm) -> None:
    assert slurm.run("model=gpt2", "sampling.stop=['a b', \"$c\"]").returncode == 0
    settings = ["model=gpt2", "sampling.stop=['a b', \"$c\"]", "shard.index=2", "shard.count=4"]
    assert slurm.calls("srun") == ["--ntasks=1", PYTHON, "-P", "-m", "jobs.generate", *settings]


def test_elastic_workers_get_the_same_run_whatever_the_array(slurm: FakeSlurm) -> None:
    assert slurm.run("model=gpt2", WEIGHTSTREAM_WORKERS="elastic").returncode == 0
    assert slurm.calls("srun")[-2:] == ["model=gpt2", "workers=elastic"]


def test_an_unknown_kind_of_workers_is_refused(slurm: FakeSlurm) -> None:
    ended = slurm.run(WEIGHTSTREAM_WORKERS="many")
    assert ended.returncode == 2
    assert "one or elastic, got many" in ended.stderr
    assert slurm.calls("srun") == []


def test_one_shard_alone_keeps_the_number_of_shards(slurm: FakeSlurm) -> None:
    slurm.run(SLURM_ARRAY_TASK_MAX="2", WEIGHTSTREAM_SHARDS="8")
    assert slurm.calls("srun")[-1] == "shard.count=8"


@pytest.mark.parametrize(("code", "is_requeued"), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (75, 1), (138, 1)])
def test_only_an_interrupted_task_is_requeued_and_only_itself(slurm: FakeSlurm, code: int, is_requeued: bool) -> None:
    assert slurm.run(STEP_CODE=str(code)).returncode == code
    assert slurm.calls("scontrol") == (["requeue 100_2"] if is_requeued else [])


def test_restarts_are_bounded(slurm: FakeSlurm) -> None:
    ended = slurm.run(STEP_CODE="75", SLURM_RESTART_COUNT="5", WEIGHTSTREAM_MAX_RESTARTS="5")
    assert ended.returncode == 75
    assert slurm.calls("scontrol") == []
    assert "not requeued after 5 restarts" in ended.stderr


def test_cancelled_task_waits_for_its_step_and_is_not_requeued(slurm: FakeSlurm) -> None:
    environment = slurm.environment(STEP_SECONDS="0.6", STEP_CODE="75")
    script = subprocess.Popen(["bash", slurm.script], env=environment)
    deadline = time.monotonic() + 10
    while not slurm.calls("srun") and time.monotonic() < deadline:
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=20) == 75
    assert slurm.calls("scontrol") == []


def test_outside_an_array_the_script_refuses(slurm: FakeSlurm) -> None:
    environment = slurm.environment()
    del environment["SLURM_ARRAY_TASK_ID"]
    ended = subprocess.run(["bash", slurm.script], env=environment, capture_output=True, text=True, timeout=20)
    assert ended.returncode != 0
    assert "submit this script as an array" in ended.stderr
    assert slurm.calls("srun") == []


def test_head_asks_for_requeue_a_warning_to_the_step_and_a_log_per_task() -> None:
    lines = script_text("generate").splitlines()
    options = [line.split()[1] for line in lines if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=USR1@120", "--open-mode=append"} <= set(options)
    log = next(option for option in options if option.startswith("--output="))
    assert "%A_%a" in log
    assert "/" not in log, "Slurm makes no directories"


def test_another_python_is_taken_if_it_is_named(slurm: FakeSlurm) -> None:
    assert slurm.run(WEIGHTSTREAM_PYTHON="/usr/bin/other").returncode == 0
    assert slurm.calls("srun")[1] == "/usr/bin/other"


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_is_there_and_bash_reads_it(name: str) -> None:
    assert subprocess.run(["bash", "-n"], input=script_text(name), text=True).returncode == 0
    assert {f"{each}.sbatch" for each in SCRIPTS} == {
        path.name for path in (ROOT / "jobs" / "data" / "slurm").iterdir()
    }


@pytest.mark.parametrize(
    ("words", "printed", "said"),
    [
        ([], script_text("generate"), script_listing() + "\n"),
        (["generate"], script_text("generate"), ""),
        (["export"], script_text("export"), ""),
        (["--help"], script_listing() + "\n", ""),
        (["exprt"], "", "error: slurm takes the name of one script, generate or export, got 'exprt'\n"),
    ],
)
def test_the_command_prints_the_script_that_is_named_and_lists_them_if_none_is(
    words: list[str], printed: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["weightstream", "slurm", *words])
    with suppress(SystemExit):
        command.main()
    assert (*capfd.readouterr(),) == (printed, said)


def test_a_terminal_gets_the_list_alone() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-m", "jobs", "slurm"], stdout=theirs, stderr=theirs, check=True, timeout=60)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert shown.replace("\r", "") == script_listing() + "\n"


def test_a_script_that_cannot_be_written_is_an_error_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "jobs", "slurm", "export"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (75, "error: cannot write to stdout: No space left on device\n")
