"""How a job ends: the line on stderr and the exit code, through Hydra itself, on a job that only plays its part."""

import json
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import hydra
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import DictConfig

from jobs.config.cli import (
    as_job,
    describe_hydra_error,
    print_error,
    print_line,
    run_job,
)
from jobs.config.settings import GenerateConfig, SynthesizeConfig, load
from jobs.config.words import expand_prompt, infer_dataset_kind, rewrite_words, suggest_key
from jobs.exporting.config import ExportConfig
from jobs.packing.config import PackConfig
from jobs.reporting.config import StatusConfig
from runtime.errors import BudgetError, ConfigError, DamagedRunError, Interrupted, JobEnded, OutputError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"

# `run=<word>` picks what the job does.
DEEDS: dict[str, BaseException | int | None] = {
    "fine": None,
    "rows_failed": 3,
    "too_big": BudgetError("the plan needs 9 GiB and offload.host_memory_gib is 4"),
    "damaged": DamagedRunError("part 7 is not ours"),
    "stopped": Interrupted("stopped at block 3"),
    "ctrl_c": KeyboardInterrupt(),
    "bug": RuntimeError("a mistake of ours"),
}


class End(NamedTuple):
    code: int | str | None
    done: list[str]
    errors: list[str]


@pytest.fixture
def end_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., End]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # run_job sets it; this puts it back

    def end_of(*arguments: str) -> End:
        done: list[str] = []

        @as_job
        def body(composed: DictConfig) -> int | None:
            config = load(GenerateConfig, composed)
            done.append(config.run or "fine")
            deed = DEEDS[done[-1]]
            if isinstance(deed, BaseException):
                raise deed
            return deed

        monkeypatch.setattr(sys, "argv", ["generate", *arguments])
        main = hydra.main(config_path=str(CONF), config_name="generate", version_base=None)(body)
        with pytest.raises(SystemExit) as ended:
            run_job(main, GenerateConfig)
        return End(code=ended.value.code, done=done, errors=capfd.readouterr().err.splitlines())

    return end_of


@pytest.mark.parametrize(
    ("codes", "worst"),
    [
        ((0, 0), 0), ((0, 3), 3), ((3, 2), 2), ((2, 4), 4), ((4, 2), 4), ((4, 3), 4), ((2, 70), 70), ((70, 4), 70),
        ((3, 75), 75), ((2, 75, 4), 75),
    ],
)  # fmt: skip
def test_a_sweep_ends_with_its_worst_code_and_a_stopped_job_stops_it(
    codes: tuple[int, ...], worst: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate"])
    jobs = [as_job(lambda _, code=code: code) for code in codes]

    def entry() -> None:
        for job in jobs:
            job(None)

    with pytest.raises(SystemExit) as ended:
        run_job(entry, GenerateConfig)
    assert ended.value.code == worst


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize(
    ("deed", "code", "errors"),
    [
        ("fine", 0, []),
        ("rows_failed", 3, []),
        ("too_big", 2, ["error: the plan needs 9 GiB and offload.host_memory_gib is 4"]),
        ("damaged", 4, ["error: part 7 is not ours"]),
        ("stopped", 75, ["interrupted: stopped at block 3"]),
        ("ctrl_c", 75, ["interrupted: start the same command again to resume"]),
    ],
)
def test_job_ends_with_its_own_code_and_at_most_one_line(
    end_of: Callable[..., End], deed: str, code: int, errors: list[str]
) -> None:
    assert end_of(f"run={deed}") == End(code=code, done=[deed], errors=errors)


@pytest.mark.dealt(most=6)
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sampling.max_tokens=3", "unknown key sampling.max_tokens: did you mean sampling.max_new_tokens?"),
        ("+sampling.max_tokens=3", "unknown key sampling.max_tokens: did you mean sampling.max_new_tokens?"),
        ("ofload=cpu", "unknown key ofload: did you mean offload?"),
        ("hydra.nothing=1", "unknown key hydra.nothing: --cfg hydra lists Hydra's keys"),
        ("model=gtp2", "model=gtp2 does not exist: did you mean gpt2? model is one of bloom, "),
        ("+model=gpt2", "model already has an option: write model=<option> without the +"),
        ("sampling=3", "a group must be set to one of its options"),
        ("sampling.max_new_tokens=many", "sampling.max_new_tokens must be a whole number, got 'many'"),
        ("sampling.seed=1,2", "sampling.seed=1,2 looks like a sweep: add --multirun"),
        ("sampling.stop=[", "cannot read 'sampling.stop=[' ("),
        ("model", "'model' is not key=value"),
        ("run=${nowhere}", "run cannot be resolved: Interpolation key 'nowhere' not found"),
        ("model=hf", "model.path is not set: model=hf needs a local directory or a hub id"),
        ("shard.index=1", "shard.index must be 0 to 0"),
        ("--config-name=nothing", "Cannot find primary config 'nothing'"),
    ],
)
def test_bad_setting_is_refused_in_one_line(end_of: Callable[..., End], argument: str, message: str) -> None:
    end = end_of(argument)
    assert (end.code, end.done) == (2, [])
    assert len(end.errors) == 1
    assert end.errors[0].startswith(f"error: {message}")


def test_launcher_without_its_plugin_names_the_extra() -> None:
    missing = MissingConfigException(
        message="Could not load", missing_cfg_file="hydra/launcher/submitit_slurm", options=["basic"]
    )
    assert describe_hydra_error(missing, []) == (
        "hydra/launcher=slurm needs the extra: pip install 'weightstream[slurm]', or submit a script: "
        "weightstream slurm > job.sbatch"
    )


def test_a_bug_ends_in_one_line_with_70_and_its_traceback_in_a_file(
    end_of: Callable[..., End], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    end = end_of("run=bug")
    assert (end.code, len(end.errors)) == (70, 1)
    [kept] = tmp_path.iterdir()
    start = "error: internal error in Weightstream: RuntimeError: a mistake of ours; the "
    assert end.errors[0].startswith(f"{start}traceback is in {kept}")
    assert kept.read_text().rstrip().endswith("RuntimeError: a mistake of ours")


def test_a_bug_outside_of_the_jobs_body_ends_in_one_line_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["generate"])

    def entry() -> None:
        raise AssertionError("a mistake of ours")

    with pytest.raises(SystemExit) as ended:
        run_job(entry, GenerateConfig)
    assert ended.value.code == 70
    assert capfd.readouterr().err.count("\n") == 1


def test_sweep_goes_on_past_a_failed_job_and_ends_with_the_worst_code(end_of: Callable[..., End]) -> None:
    end = end_of("--multirun", "run=rows_failed,too_big,fine")
    assert end == End(
        code=2,
        done=["rows_failed", "too_big", "fine"],
        errors=["error: the plan needs 9 GiB and offload.host_memory_gib is 4"],
    )


def test_interruption_ends_the_whole_sweep(end_of: Callable[..., End]) -> None:
    end = end_of("--multirun", "run=fine,stopped,rows_failed")
    assert (end.code, end.done) == (75, ["fine", "stopped"])


def test_single_run_leaves_no_file_of_hydras(end_of: Callable[..., End], tmp_path: Path) -> None:
    end_of()
    assert list(tmp_path.iterdir()) == []


def test_sweep_writes_only_below_the_output_root(end_of: Callable[..., End], tmp_path: Path) -> None:
    end_of("--multirun", "sampling.seed=0,1", "output_root=here")
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ["here/sweep/multirun.yaml"]


SBATCH_REFUSES = "#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpuu' >&2\nexit 1\n"
SLURMS = {
    "sbatch refuses": (
        {"srun": "#!/bin/sh\n", "sbatch": SBATCH_REFUSES},
        "invalid partition specified: gpuu. Check",
    ),
    "sbatch says nothing": ({"srun": "#!/bin/sh\n", "sbatch": "#!/bin/sh\nexit 3\n"}, "exit code 3, no message"),
    "no sbatch": ({"srun": "#!/bin/sh\n"}, "needs srun and sbatch"),
    "no Slurm": ({}, "needs srun and sbatch"),
}


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(("programs", "said"), SLURMS.values(), ids=SLURMS)
def test_what_slurm_refuses_is_refused_in_its_own_words(
    end_of: Callable[..., End],
    programs: dict[str, str],
    said: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    folder = tmp_path_factory.mktemp("bin")
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    end = end_of("--multirun", "hydra/launcher=slurm", "sampling.seed=0,1")
    assert (end.code, end.done) == (2, [])
    assert said in end.errors[-1]
    assert "hydra.launcher.partition" in end.errors[-1] or "hydra/launcher=slurm" in end.errors[-1]


def test_a_sweep_that_cannot_be_written_is_refused_by_its_key(end_of: Callable[..., End]) -> None:
    end = end_of("--multirun", "sampling.seed=0,1", "output_root=/proc/nope")
    assert (end.code, end.done) == (2, [])
    assert end.errors == [
        "error: cannot write /proc/nope: No such file or directory; set output_root to another directory"
    ]


def test_a_key_of_an_architecture_is_unknown_to_a_run(end_of: Callable[..., End]) -> None:
    for word in ("architecture.hidden_size=64", "+architecture.hidden_size=64"):
        end = end_of("model=tiny", word)
        assert (end.code, end.done) == (2, [])
        assert end.errors[-1].startswith("error: unknown key architecture.hidden_size: known keys: ")


def test_errors_reach_a_launcher_that_runs_the_job_in_its_own_process() -> None:
    @as_job
    def body(_: None) -> None:
        raise BudgetError("too big")

    with pytest.raises(BudgetError, match="too big"):
        body(None)


def test_exit_codes_reach_a_launcher_as_errors() -> None:
    @as_job
    def body(code: int) -> int:
        return code

    assert body(0) == 0
    with pytest.raises(JobEnded) as ended:
        body(3)
    copy = pickle.loads(pickle.dumps(ended.value))
    assert (copy.exit_code, str(copy)) == (3, "a job of the sweep ended with exit code 3; see its log")


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("job", ["generate", "plan", "synthesize"])
def test_a_launcher_can_take_the_job_to_another_process(job: str) -> None:
    """As `python -m` runs it: what stands in `__main__` is pickled by value, with all the globals that it names."""
    program = f"""
import cloudpickle, runpy, sys
main = runpy.run_module("jobs.{job}", run_name="jobs.{job}")["main"]
main.__module__ = main.__wrapped__.__module__ = "__main__"
sys.stdout.buffer.write(cloudpickle.dumps(main.__wrapped__))
"""
    taken = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert taken.returncode == 0, taken.stderr.decode()[-500:]
    there = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).__name__)"
    came = subprocess.run([sys.executable, "-c", there], cwd=ROOT, input=taken.stdout, capture_output=True, timeout=60)
    assert came.stdout == b"main\n", came.stderr.decode()[-500:]


def test_control_characters_of_a_message_never_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    print_error("row '\x1b[2J\r\x07' is bad\nsecond line")
    assert capfd.readouterr().err == "error: row '\\x1b[2J\\r\\x07' is bad\nsecond line\n"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model=hf", "out is not set"),
        (
            "architecture=mixtral",
            "architecture=mixtral: architecture has no options: choose a model with model=mixtral",
        ),
        (
            "architecture.num_layers=2",
            "unknown key architecture.num_layers: to add it to architecture, write +arch",
        ),
        ("model.dtype=float16", "model.dtype has no effect in this job: leave it out"),
        ("seed=1", "out is not set"),
        ("--seed=1", "--seed=1 is a setting, not an option: write seed=1"),
        (
            "model=/some/dir",
            "model=/some/dir does not exist: for a directory or a hub id write model=hf model.path=/some/dir",
        ),
    ],
)
def test_synthesize_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    assert refused(monkeypatch, capfd, "synthesize", argument, SynthesizeConfig).startswith(f"error: {message}")


def test_random_weights_of_a_model_that_is_published_in_fewer_bytes_are_plain(tmp_path: Path) -> None:
    sizes = ("num_hidden_layers=1", "hidden_size=64", "intermediate_size=64", "num_local_experts=4", "vocab_size=300")
    settings = ["model=gpt-oss-20b", f"out={tmp_path}/out", *(f"architecture.{size}" for size in sizes)]
    with initialize_config_dir(str(CONF), version_base=None):
        composed = compose("synthesize", overrides=settings)
    assert composed.architecture.quantization_config.quant_method == "mxfp4"
    runpy.run_module("jobs.synthesize", run_name="jobs.synthesize")["main"].__wrapped__(composed)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_model_that_is_a_directory_here_is_said_to_be_a_path(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert refused(monkeypatch, capfd, "synthesize", "model=m", SynthesizeConfig) == (
        "error: model=m does not exist: for a directory or a hub id write model=hf model.path=m\n"
    )


def test_a_job_that_knows_its_model_by_the_path_alone_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capfd, "pack", "model=hf", PackConfig) == (
        "error: model has no effect in this job: leave it out; set model.path\n"
    )


def refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], job: str, argument: str, schema: type
) -> str:
    """What is said of one setting of a job, which is refused."""
    monkeypatch.setattr(sys, "argv", [job, argument])

    @as_job
    def body(composed: DictConfig) -> None:
        load(schema, composed)

    with pytest.raises(SystemExit) as ended:
        run_job(hydra.main(config_path=str(CONF), config_name=job, version_base=None)(body), schema)
    assert ended.value.code == 2
    return capfd.readouterr().err


def test_a_reader_that_has_left_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `weightstream models | head -1`: the rest goes nowhere, and the exit code is the job's own."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as unread:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stdout", unread)
        print_line("a first line")
        print_line("a second one")
        monkeypatch.undo()


def test_a_stdout_without_room_is_an_error_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OutputError, match="cannot write to stdout: No space left on device"):
            print_line("a line")
        monkeypatch.undo()


def test_a_path_that_is_not_utf8_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["export", "out=gr\udcfc.jsonl"])

    @as_job
    def body(composed: DictConfig) -> None:
        load(ExportConfig, composed)

    with pytest.raises(SystemExit) as ended:
        run_job(hydra.main(config_path=str(CONF), config_name="export", version_base=None)(body), ExportConfig)
    assert ended.value.code == 2
    assert "not UTF-8; rename the file, or make a link" in capfd.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is",
        "Hello, how are you? What's up",
        'a "b" [c] {d} $HOME ${x} e=f',
        "back\\slash \\' and at the end \\",
        "two\nlines: ünïcode",
    ],
)
def test_a_prompt_on_the_command_line_is_taken_as_it_is_typed(text: str) -> None:
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        composed = compose("generate", expand_prompt(["model=tiny", f"prompt={text}"]))
    assert load(GenerateConfig, composed).dataset.prompt == text


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["dataset.path=prompts.csv"], "csv"),
        (["dataset.path=/a/b.tsv.gz", "dataset.limit=3"], "csv"),
        (["dataset.path='~/my prompts.jsonl'"], "jsonl"),
        (["dataset.path=s3://bucket/a.json"], "jsonl"),
        (["dataset.path=a.ndjson.zst"], "jsonl"),
        (["dataset.path=rows.parquet"], "parquet"),
        (["dataset.path=rows.xlsx"], None),
        (["dataset.path=folder/"], None),
        (["dataset.limit=3"], None),
        (["dataset=mtbench", "dataset.path=question.jsonl"], None),
        (["dataset.path=question.jsonl", "dataset=openai_batch"], None),
        (["dataset.kind=helm", "dataset.path=a.json"], None),
        (["prompt=x"], None),
        (["dataset.path=a.csv", "--cfg", "job"], "csv"),
        (["--multirun", "dataset.path=a.csv,b.csv"], "csv"),
        (["--multirun", "dataset.path=a.csv,b.jsonl"], None),
    ],
    ids=str,
)
def test_the_ending_of_a_path_tells_the_kind_of_data_set_where_none_is_chosen(
    words: list[str], kind: str | None
) -> None:
    given = expand_prompt(words)
    found = infer_dataset_kind(given)
    assert [word for word in found if word not in given] == ([f"dataset={kind}"] if kind is not None else [])
    assert [word for word in found if word in given] == given


@pytest.mark.parametrize("job", ["generate", "score", "encode"])
def test_a_path_alone_is_enough_for_every_job_that_reads_one(job: str) -> None:
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        assert compose(job, infer_dataset_kind(["dataset.path=prompts.csv"])).dataset.kind == "csv"


PLAIN_TEXTS = [
    "~nobody-of-this-name/x.csv",
    "a=b.csv",
    "a;b {c} [d] (e), f: 'g' \"h\" #i",
    '"one" and "two"',
    "1e5",
    "true",
    "*.csv",
    " spaces ",
    "ünïcode",
    "\\n",
]


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_a_text_setting_takes_any_text(text: str) -> None:
    words = rewrite_words([f"dataset.prompt_field={text}"], GenerateConfig)
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        assert compose("generate", words).dataset.prompt_field == text


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("sampling.stop=END", ["END"]),
        ("sampling.stop=a,b", ["a", "b"]),
        ("sampling.stop=[a,b]", ["a", "b"]),
        ("sampling.stop=Q:", ["Q:"]),
        ("sampling.stop=null", None),
        ("sampling.stop='[\"a,b\"]'", ['["a,b"]']),
    ],
)
def test_a_text_is_a_list_of_one(word: str, value: list[str] | None) -> None:
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        assert load(GenerateConfig, compose("generate", rewrite_words([word], GenerateConfig))).sampling.stop == value


def test_quoted_and_null_and_interpolated_values_and_sweeps_keep_their_meaning() -> None:
    for word in ("model.path=null", "run='a b'", 'run="a, b"', "run=${model.name}", "sampling.seed=1,2", "run=a\\,b"):
        assert rewrite_words([word], GenerateConfig) == [word]
    sweep = ["--multirun", "run=a,b", "dataset.path=a.csv"]
    assert rewrite_words(sweep, GenerateConfig) == [*sweep[:2], "dataset=csv", sweep[2]]


def test_a_path_below_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert rewrite_words(["output_root=~/out"], GenerateConfig) == ['output_root="/home/me/out"']
    assert rewrite_words(["dataset.prompt_field=~/x"], GenerateConfig) == ['dataset.prompt_field="~/x"']


def test_a_model_is_a_directory_a_file_a_hub_id_or_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "m.yaml").touch()
    for place in ("m", "./m", "org/name", "x.gguf", "s3://bucket/m"):
        path = "m" if place == "./m" else place
        assert rewrite_words([f"model={place}"], GenerateConfig) == ["model=hf", f'model.path="{path}"']
        assert rewrite_words([f"model={place}"], PackConfig)[0].startswith("model.path=")
    for word in ("model=tiny", "model=mixtral", "model=mixtrall", "+model=m"):
        assert rewrite_words([word], GenerateConfig) == [word]
    assert rewrite_words(["--config-dir", "conf", "model=m"], GenerateConfig)[2:] == ["model=m"]


def test_a_bare_word_is_a_run_where_runs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    assert rewrite_words(["a b", "format=json"], StatusConfig) == ['run="a b"', "format=json"]
    assert rewrite_words(["a b", "s3://b/x", "--cfg", "job"], StatusConfig) == [
        'run=["a b","s3://b/x"]',
        "--cfg",
        "job",
    ]
    assert rewrite_words(["out=x.csv", "a*"], ExportConfig) == ['out="x.csv"', 'run="a*"']
    with pytest.raises(ConfigError, match="there is no run b: name a run's directory"):
        rewrite_words(["b"], StatusConfig)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["prompt=What", "is", "2+2", "trace=true"], r'a text with spaces is quoted: prompt="What is 2\+2"'),
        (["trace", "prompt=hi"], "write trace=true"),
        (["rows.csv"], "write dataset.path=rows.csv"),
        (["folder"], "write model=folder"),
        (["nothing"], "--help shows how to call this job"),
    ],
)
def test_a_bare_word_elsewhere_is_answered_with_the_word_to_write(
    words: list[str], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=advice):
        rewrite_words(words, GenerateConfig)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json"], "unknown option --json: settings are written key=value: did you mean summary=json?"),
        (["-q"], "unknown option -q: settings are written key=value: did you mean quiet=true?"),
        (["--seed", "3"], "did you mean sampling.seed=3?"),
        (["--seed=3"], "did you mean sampling.seed=3?"),
        (["--nothing"], "unknown option --nothing: settings are written key=value; --help shows them"),
        (["output=jsonl"], "output=jsonl: write out=answers.jsonl to get the answers as one file"),
    ],
)
def test_an_unknown_option_is_answered_in_a_line(words: list[str], message: str) -> None:
    assert message in (suggest_key(words, GenerateConfig) or "")


def test_options_of_hydra_and_negative_numbers_are_no_unknown_options() -> None:
    words = ["--cfg", "job", "-m", "--config-dir", "conf", "sampling.seed=-1", "output=parts"]
    assert suggest_key(words, GenerateConfig) is None


def test_several_paths_of_a_model_are_its_path_and_mirrors() -> None:
    for key in ("model", "model.path"):
        found = rewrite_words([f"{key}=[/a/m,/b/m]"], GenerateConfig)
        assert 'model.mirrors=["/b/m"]' in found
        assert 'model.path="/a/m"' in found
    assert not any("mirrors" in word for word in rewrite_words(["model=[/a/m]"], GenerateConfig))
    with pytest.raises(ConfigError, match="reads one directory: model=/a/m"):
        rewrite_words(["model=[/a/m,/b/m]"], PackConfig)


def test_a_model_that_is_a_file_here_is_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "m.csv").touch()
    monkeypatch.chdir(tmp_path)
    assert refused(monkeypatch, capfd, "synthesize", "model=m.csv", SynthesizeConfig) == (
        "error: model=m.csv is a file and no model: set a directory, a GGUF file or a hub id\n"
    )
