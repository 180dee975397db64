"""A run that an earlier version of Millrace began and did not finish goes on with this one: `tests/begun_before`."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir

import runtime
from jobs.config.settings import GenerateConfig, load
from jobs.run.generation import Outcome, generate

ROOT = Path(__file__).resolve().parents[2]
BEGUN = ROOT / "tests" / "begun_before"
FOR_BOTH = (f"model.path={BEGUN / 'model'}", "model=hf", "sampling.ignore_eos=true")
FOR_BOTH += ("policy=fixed", "policy.micro_batch_size=2", "policy.num_micro_batches=2")
SETTINGS = {
    "waves": ("dataset=sample", "dataset.limit=12", "sampling.max_new_tokens=32"),
    "continuous": (
        *("dataset=jsonl", f"dataset.path={BEGUN / 'prompts.jsonl'}", "dataset.id_field=id"),
        *("dataset.max_new_tokens_field=limit", "policy.admission=continuous", "sampling.logprobs=2"),
    ),
}
KNOWN = {
    "waves": "going on: 0 rows of open parts are finished, 4 are begun, with 28 tokens",
    "continuous": "going on: 1 rows of open parts are finished, 2 are begun, with 51 tokens",
}
STATUSES = {"waves": {"ok": 12}, "continuous": {"ok": 9, "error": 1}}


def finish(run: str, output_root: Path) -> Outcome:
    """The command that the run was begun with, in another directory."""
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base=None):
        composed = compose("generate", [f"run={run}", f"output_root={output_root}", *FOR_BOTH, *SETTINGS[run]])
    return generate(load(GenerateConfig, composed), lambda: False)


def rows_of(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """By id: how it ended, and its tokens; of every part, each row once."""
    rows = [row for part in sorted((directory / "generations").iterdir()) for row in pq.read_table(part).to_pylist()]
    by_id = {row["id"]: (row["status"], row["token_ids"]) for row in rows}
    assert len(by_id) == len(rows), "a row is there twice"
    return by_id


def lasting_files(directory: Path) -> dict[str, bytes]:
    """What a run that goes on leaves as it is: committed parts, and what the run is bound to."""
    names = ("generations/*", "throughput/*", "run.json", "plan.parquet", "row_digests.parquet")
    paths = [path for name in names for path in sorted(directory.glob(name))]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("run", SETTINGS)
def test_a_run_begun_before_goes_on_from_its_tokens_and_keeps_its_parts(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(BEGUN / "generate", tmp_path / "copy" / "generate")
    was = lasting_files(tmp_path / "copy" / "generate" / run)
    with caplog.at_level(logging.INFO):
        outcome = finish(run, tmp_path / "copy")
    assert KNOWN[run] in caplog.messages
    rows = rows_of(outcome.directory)
    assert Counter(status for status, _ in rows.values()) == STATUSES[run]
    assert outcome.exit_code == (3 if "error" in STATUSES[run] else 0)
    assert was.items() <= lasting_files(outcome.directory).items()
    assert not list(outcome.directory.glob("running*"))
    assert not (outcome.directory / "quarantine").exists()

    columns = {tuple(pq.read_schema(part).names) for part in (outcome.directory / "generations").iterdir()}
    assert len(columns) == 1, "all parts of a run have the columns of its first"
    assert not {"row_index", "source_file"} & set(*columns)

    fresh = finish(run, tmp_path / "fresh").directory
    assert {"row_index", "source_file"} <= set(pq.read_table(fresh / "generations").column_names)
    assert rows == rows_of(fresh)
    assert json.loads((fresh / "run.json").read_text())["versions"]["millrace"] == runtime.__version__
