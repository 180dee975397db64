"""What a shell's TAB offers behind `weightstream`, and that bash takes it."""

import os
import pty
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from jobs.config.help import completions
from jobs.config.typed import flatten

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["generate", "measure", "models", "plan", "completion"]
HEAVY = {"torch", "transformers", "hydra", "omegaconf", "numpy", "pyarrow"}
PROMPT = b"ready> "


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("m", ["measure", "models"]),
        ("--v", ["--version"]),
        ("completion f", ["fish"]),
        ("slurm ", ["generate", "export"]),
        ("generate mod", ["model=", "model."]),
        ("generate model=mixtral", ["model=mixtral", "model=mixtral-8x22b"]),
        ("generate offload=", ["offload=auto", "offload=cpu", "offload=none", "offload=nvme"]),
        ("generate prefetch.", ["prefetch.kind=", "prefetch.depth=", "prefetch.block_layers="]),
        ("generate policy.admission=", ["policy.admission=wave", "policy.admission=continuous"]),
        ("generate prefetch=off policy.schedule=n", ["policy.schedule=null"]),
        ("generate sampling.ignore_eos=", ["sampling.ignore_eos=true", "sampling.ignore_eos=false"]),
        ("generate --m", ["--multirun"]),
        ("generate --v", ["--version"]),
        ("generate hydra", []),
        ("help ge", ["generate"]),
        (
            "export format=",
            ["format=jsonl", "format=csv", "format=parquet", "format=openai_batch", "format=fastchat", "format=null"],
        ),
        ("export errors=d", ["errors=drop"]),
        ("export partial=", ["partial=true", "partial=false"]),
        ("plan plan.sweep=m", ["plan.sweep=memory"]),
        ("models format=", ["format=text", "format=markdown"]),
        ("plan machine=t4 machine.s", ["machine.sheet."]),
        ("plan machine=t4 machine.sheet.link", ["machine.sheet.link_gb_per_second=", "machine.sheet.link_lanes="]),
        ("bench suite=gpu gpu.sh", ["gpu.shape."]),
        ("synthesize model=gpt2-xl architecture.n_h", ["architecture.n_head="]),
        ("synthesize model=mixtral architecture.num_local", ["architecture.num_local_experts="]),
        ("generate model=mixtral arch", []),
        ("generate model=none_such off", ["offload=", "offload."]),
        ("generate model=${model} off", ["offload=", "offload."]),
        ("generate model.path=/tm", []),
        ("no_such_job mod", []),
    ],
)
def test_offered_is_what_can_stand_there(words: str, offered: list[str]) -> None:
    assert completions(words.split(" "), COMMANDS) == offered


@pytest.mark.parametrize(
    "job",
    [
        *("generate", "export", "metrics", "report", "plan", "measure", "bench"),
        *("synthesize", "pack", "models", "trace", "serve"),
    ],
)
def test_every_setting_of_a_job_is_offered(job: str) -> None:
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base=None):
        settings = OmegaConf.to_container(compose(job), resolve=False)
    assert isinstance(settings, dict)
    of_others = () if job == "synthesize" else ("architecture.",)  # which a model's file brings along
    keys = [key for key in flatten(settings) if not key.startswith(of_others)]
    assert len(keys) > 2
    for key in keys:
        assert {f"{key}=", f"{key}."} & set(completions([job, key], COMMANDS))


def test_an_answer_loads_nothing_that_takes_long() -> None:
    program = f"""
import sys
from jobs import __main__ as command
sys.argv = ["weightstream", "completion", "answer", "generate", "policy.schedule="]
command.main()
print(*({HEAVY!r} & sys.modules.keys()))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "policy.schedule=zigzag"
    assert ended.stdout.splitlines()[-1] == ""


def test_bash_completes_a_whole_command_at_tab(tmp_path: Path) -> None:
    """Typed into a terminal: each TAB is taken before the next word begins, and what came of it is run."""
    program, took = tmp_path / "weightstream", tmp_path / "took"
    program.write_text(
        f'#!/bin/bash\n[[ $1 == completion ]] && PYTHONPATH="{ROOT}" exec "{sys.executable}" -m jobs "$@"\n'
        f'printf "%s\\n" "$@" > "{took}"\n'
    )
    program.chmod(0o755)
    (tmp_path / "prompts.jsonl").touch()
    typed = b"weightstream gen\tmodel=mixtral-8\toffload.ti\tnv\tdataset.path=prom\t--mul\t\n"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PS1": PROMPT.decode(), "TERM": "dumb"}
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=theirs, stdout=theirs, stderr=theirs,
        cwd=tmp_path, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    too_late = Timer(120, shell.kill)  # what reads from it then fails
    too_late.start()
    for line in (b"source <(weightstream completion bash)\n", typed, b"exit\n"):
        said = b""
        while not said.endswith(PROMPT):
            said += os.read(ours, 1000)
        os.write(ours, line)
    shell.wait()
    too_late.cancel()
    os.close(ours)
    words = ["generate", "model=mixtral-8x22b", "offload.tier=nvme", "dataset.path=prompts.jsonl", "--multirun"]
    assert took.read_text().splitlines() == words
