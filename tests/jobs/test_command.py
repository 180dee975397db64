"""The command `weightstream`, which is `python -m jobs`: every job as `python -m jobs.*` has it, and what is its
own."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import runtime
from jobs import __main__ as command

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if path.stem not in ("__init__", "__main__"))
INSTALLED = "import sys\nfrom jobs.__main__ import main\nsys.exit(main())\n"  # as pip writes it


class End(NamedTuple):
    code: int | str | None
    printed: list[str]
    errors: list[str]


@pytest.fixture
def end_of(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., End]:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # run_job sets it; this puts it back

    def end_of(*words: str) -> End:
        code: int | str | None = 0
        monkeypatch.setattr(sys, "argv", ["weightstream", *words])
        try:
            command.main()
        except SystemExit as ended:
            code = ended.code
        printed, errors = capfd.readouterr()
        return End(code=code, printed=printed.splitlines(), errors=errors.splitlines())

    return end_of


def test_the_package_installs_it() -> None:
    module, _, function = PROJECT["scripts"]["weightstream"].partition(":")
    assert getattr(sys.modules[module], function) is command.main


def test_its_version_is_the_packages(end_of: Callable[..., End]) -> None:
    assert end_of("--version") == End(code=0, printed=[f"weightstream {PROJECT['version']}"], errors=[])
    assert runtime.__version__ == PROJECT["version"]


def test_help_has_a_line_for_each_job_and_alone_it_is_refused_with_that(end_of: Callable[..., End]) -> None:
    helped, alone = end_of("--help"), end_of()
    lines = [line.split(maxsplit=1) for line in helped.printed if line.startswith("  ")]
    assert [name for name, _ in lines] == [*JOBS, "slurm", "help", "completion"]
    assert ["generate", "generates a completion for each prompt of a data set"] in lines
    assert max(map(len, helped.printed)) <= 120
    assert (helped.code, helped.errors) == (0, [])
    assert (alone.code, alone.printed, alone.errors) == (2, [], helped.printed)


@pytest.mark.parametrize(
    ("words", "asked"),
    [("help policy", "jobs.generate --help policy"), ("help plan policy", "jobs.plan --help policy")],
)
def test_help_is_asked_of_generate_if_no_job_is_named(
    end_of: Callable[..., End], monkeypatch: pytest.MonkeyPatch, words: str, asked: str
) -> None:
    monkeypatch.setattr("runpy.run_module", lambda module, **_: print(module, *sys.argv[1:]))
    assert end_of(*words.split()) == End(code=0, printed=[asked], errors=[])


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("generat", "error: unknown job 'generat': did you mean generate?"),
        ("model=mixtral", "error: unknown job 'model=mixtral': weightstream --help lists them"),
        ("completions", "error: unknown job 'completions': did you mean completion?"),
        ("__main__", "error: unknown job '__main__': weightstream --help lists them"),
    ],
)
def test_an_unknown_job_is_refused_in_one_line(end_of: Callable[..., End], word: str, error: str) -> None:
    assert end_of(word) == End(code=2, printed=[], errors=[error])


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("trace",), 2, "error: run is not set: a run directory, or a file in <run>/trace "),
        (("trace", "runn=x"), 2, "error: unknown key runn: did you mean run?"),
        (("plan", "model=gtp2"), 2, "error: model=gtp2 does not exist: did you mean gpt2? "),
        (("synthesize", "out=x", "architecture.num_layers=2"), 2, "error: unknown key architecture.num_layers: "),
    ],
)
def test_a_job_is_refused_as_python_m_refuses_it(
    end_of: Callable[..., End], words: tuple[str, ...], code: int, error: str
) -> None:
    end = end_of(*words)
    assert (end.code, end.printed, len(end.errors)) == (code, [], 1)
    assert end.errors[0].startswith(error)


@pytest.mark.parametrize("words", [(), ("tcsh",), ("bash", "zsh")])
def test_completion_of_no_shell_that_is_known_is_refused(end_of: Callable[..., End], words: tuple[str, ...]) -> None:
    errors = ["error: completion needs the name of a shell: bash, zsh or fish"]
    assert end_of("completion", *words) == End(code=2, printed=[], errors=errors)


def test_a_job_ends_with_its_own_exit_code(
    end_of: Callable[..., End], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("jobs.config.settings.TraceConfig.__post_init__", lambda _: 1 / 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert end_of("trace").code == 70


@pytest.mark.parametrize("is_installed", [True, False], ids=["weightstream", "python -m jobs"])
def test_a_job_that_starts_itself_again_comes_back_with_its_settings(is_installed: bool, tmp_path: Path) -> None:
    script = tmp_path / "weightstream"
    script.write_text(INSTALLED)
    start = [str(script)] if is_installed else ["-m", "jobs"]
    settings = ["run=${oc.env:GOMP_SPINCOUNT}", "sampling.stop=['a b']", "--cfg", "job", "--resolve"]
    ended = subprocess.run(
        [sys.executable, *start, "generate", *settings],
        env={"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "run: '1000'\n" in ended.stdout, "only a process that was started again has this in its environment"
    assert "- a b\n" in ended.stdout


def test_a_job_is_begun_before_anything_of_ours_is_imported() -> None:
    """From there on a stop signal ends it with 75."""
    program = "import runpy, sys; runpy.run_module = lambda *_, **__: print(sorted(name for name in sys.modules"
    program += " if name.partition('.')[0] in ('jobs', 'runtime', 'yaml'))); sys.argv = ['weightstream', 'generate']"
    program += "; from jobs.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "['jobs', 'jobs.__main__']\n", ended.stderr


def test_a_launcher_can_take_its_job_to_another_process() -> None:
    """As Slurm's does: pickled here, by value as far as it stands in `__main__`, and called there."""
    program = """
import cloudpickle, sys
from jobs import __main__ as command
from jobs.config import cli

cli.run_job = lambda main, schema: sys.stdout.buffer.write(cloudpickle.dumps(main.__wrapped__))
sys.argv = ["weightstream", "models"]
command.main()
"""
    taken = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert taken.returncode == 0, taken.stderr.decode()[-500:]
    there = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).__name__)"
    came = subprocess.run([sys.executable, "-c", there], cwd=ROOT, input=taken.stdout, capture_output=True, timeout=60)
    assert came.stdout == b"main\n", came.stderr.decode()[-500:]
