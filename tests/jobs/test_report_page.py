"""The page of one run: it needs nothing beside it, what stands in it is text, and it is there however far a run is."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.files.publishing import JsonValue, write_json
from jobs.pictures.trace_file import RUN, publish_trace
from jobs.record.output_rows import GenerationRow, infer_column_schema, score_schema
from jobs.record.parts import PartStore
from jobs.record.plan_file import PlannedRequest, publish_plan
from jobs.record.run_dir import RunDirectory
from jobs.record.run_reader import find_runs
from jobs.reporting.figures import RunFigures
from jobs.reporting.page import NUM_FAILED, write_page
from jobs.reporting.samples import failed_rows, good_rows
from runtime.resources import Resource
from runtime.trace import Span, TracedPass
from tests.jobs.parsed_html import Parsed, outside
from tests.jobs.part_support import MANIFEST, PASSES
from tests.jobs.sharded_run import ShardedRun

EVIL = '<script>alert(1)</script><img src=https://example.org/x onerror=y> </style> & "q" \u202e\x1b[31m'


def figures_of(path: Path) -> RunFigures:
    [run] = find_runs([str(path)], "run")
    return RunFigures(run=run)


def page(path: Path, tmp_path: Path, *, num_samples: int = 12) -> Parsed:
    return Parsed(write_page(figures_of(path), num_samples, tmp_path / "page").read_text(encoding="utf-8"))


@pytest.fixture
def evil(tmp_path: Path) -> RunDirectory:
    """A run whose every text would like to be more than that, with 60 rows that failed."""
    run = RunDirectory(path=tmp_path / "<b>run")
    for folder in (run.generations, run.throughput):
        folder.mkdir(parents=True)
    settings = {
        **MANIFEST.semantic,
        "dataset.kind": "jsonl",
        "dataset.prompt_field": EVIL,
        "sampling.stop": [EVIL],
        "model.name": EVIL,
    }
    manifest = replace(MANIFEST, semantic=settings, versions={"torch": EVIL})
    write_json(run.manifest, manifest.to_json(), exclusive=True)
    plan = [
        PlannedRequest(
            row_id=f"{EVIL}{i}",
            row_index=i,
            sample_index=0,
            block=i // 40,
            micro_batch=0,
            position=i,
            num_prompt_tokens=3,
        )
        for i in range(80)
    ]
    publish_plan(run.plan, plan)
    store = PartStore(directory=run, manifest=manifest, plan=plan, columns=infer_column_schema([{EVIL: EVIL}]))
    for block, requests in store.blocks.items():
        rows = [
            GenerationRow(id=each.row_id, sample_index=0, status="error", error=EVIL)
            if each.row_index < 60
            else GenerationRow(id=each.row_id, sample_index=0, status="ok", completion=EVIL, columns={EVIL: EVIL})
            for each in requests
        ]
        store.commit(block, rows, PASSES)
    ledger = {
        "memory": EVIL,
        "budget_bytes": 9,
        "budget_key": EVIL,
        "entries": [{"name": EVIL, "num_bytes": 5, "equation": EVIL}],
    }
    write_json(run.summary, {"ledgers": [ledger], "plan": {EVIL: EVIL}}, exclusive=True)
    return run


def test_no_request_leaves_the_page_and_nothing_in_it_runs(evil: RunDirectory, tmp_path: Path) -> None:
    publish_trace_of(evil)
    parsed = page(evil.path, tmp_path)
    assert list(outside(parsed)) == []
    assert parsed.open == [], "every element is closed"
    policies = [each["content"] for tag, each in parsed.tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_text_of_a_run_stays_text(evil: RunDirectory, tmp_path: Path) -> None:
    text = page(evil.path, tmp_path).text
    shown = EVIL.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")
    # name of the run, model, stop, version, ledger, ids, errors, prompts and completions
    assert "<b>run" in text
    assert text.count(shown) > 2 * NUM_FAILED + 3 * 12 + 5
    assert "\u202e" not in text


def publish_trace_of(run: RunDirectory) -> None:
    run.trace.mkdir()
    spans = [Span(Resource.disk, "read 1", 0.0, 1.0), Span(Resource.compute, EVIL, 1.0, 4.0)]
    publish_trace(run.trace / "start-00000.json", RUN, spans, [TracedPass("prefill pass 0", 0.0, 4.0)])


def test_the_page_has_the_sections_of_what_there_is(evil: RunDirectory, tmp_path: Path) -> None:
    publish_trace_of(evil)
    text = page(evil.path, tmp_path).text
    titles = (
        "Settings", "Predicted beside measured", "Throughput over time", "What was busy", "Memory as planned",
        "Rows that failed, the first 50", "Samples",
    )  # fmt: skip
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert re.search(r"disk\s*25%compute\s*75%", text)


def test_changed_settings_come_first_with_their_defaults(tmp_path: Path) -> None:
    case = ShardedRun(folder=tmp_path, identity={"model.name": "tiny", "sampling.temperature": 0.75}).finish(0)
    text = page(case.directory(0).path, tmp_path).text
    assert "sampling.temperature0.750.0" in text
    assert text.index("sampling.temperature") < text.index("as by default") < text.index("model.nametiny")


def test_failed_rows_are_the_first_of_the_input_and_samples_come_from_all_blocks(evil: RunDirectory) -> None:
    figures = figures_of(evil.path)
    assert [row.row_index for row in failed_rows(figures, 3)] == [0, 1, 2]
    assert len(failed_rows(figures, NUM_FAILED)) == NUM_FAILED
    samples = good_rows(figures, 5)
    assert {row.status for row in samples} == {"ok"}
    assert [row.prompt for row in samples] == [EVIL] * len(samples)


ROW = {"q": {"text": "2+2?"}, "gold": "4"}
FROM_FILE = {"dataset.kind": "jsonl", "dataset.path": "rows.jsonl"}
CHAT = {"from": "human", "value": "2+2?"}
ASKED: dict[str, tuple[dict[str, JsonValue], dict[str, Any], str | None, str | None]] = {
    "a template": ({"dataset.template": "Q: {q.text}\\nA:"}, ROW, "Q: 2+2?\nA:", None),
    "a template with the id": ({"dataset.template": "{gold} {key}", "dataset.id_field": "key"}, ROW, "4 0", None),
    "examples": (
        {"dataset.template": "{gold}", "dataset.few_shot_path": "x.csv", "dataset.num_examples": 3},
        ROW,
        "[3 examples from x.csv]\n\n4",
        "It begins with 3 examples from x.csv, which the run did not keep.",
    ),
    "a field": ({"dataset.prompt_field": "gold"}, ROW, "4", None),
    "a field as a chat": (
        {"dataset.prompt_field": "gold", "dataset.chat_template": True, "dataset.system_prompt": "Be brief."},
        ROW,
        "system: Be brief.\n\nuser: 4",
        "the model's chat template was applied",
    ),
    "messages": (
        {"dataset.messages_field": "chat", "dataset.chat_template": True},
        {"chat": [CHAT, {"role": "assistant", "content": "4"}]},
        "user: 2+2?\n\nassistant: 4",
        "the model's chat template was applied",
    ),
    "the setting": ({"dataset.kind": "prompt", "dataset.prompt": "Hello"}, {}, "Hello", None),
    "a batch": (
        {"dataset.kind": "openai_batch"},
        {"url": "/v1/chat/completions", "body": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}},
        "user: Hi",
        "the model's chat template was applied",
    ),
    "a turn of a question": ({"dataset.kind": "mtbench"}, {"turns": ["One?", "Two?"]}, "One?", None),
    "a field that was not kept": (
        {"dataset.prompt_field": "prompt"},
        ROW,
        'q: {"text": "2+2?"}\ngold: 4',
        "cannot be rebuilt from the columns that the run kept: there is no field",
    ),
    "a template of what was not kept": (
        {"dataset.template": "{other}"},
        ROW,
        'q: {"text": "2+2?"}\ngold: 4',
        "cannot be rebuilt from the columns that the run kept: there is no field",
    ),
    "rows of several files": (
        {"dataset.kind": "helm_summarization"},
        ROW,
        'q: {"text": "2+2?"}\ngold: 4',
        "dataset=helm_summarization makes a prompt of these columns and others.",
    ),
    "no columns": ({"dataset.keep_columns": False}, {}, None, "is not in the run: dataset.keep_columns=false."),
    "tokens": ({"dataset.keep_columns": True}, {}, None, "it was given as tokens, not as a row of a file."),
}


@pytest.mark.dealt(most=5)
@pytest.mark.parametrize(("settings", "row", "prompt", "note"), ASKED.values(), ids=ASKED)
def test_a_sample_shows_what_was_asked_or_the_columns_that_were_kept(
    settings: dict[str, JsonValue], row: dict[str, Any], prompt: str | None, note: str | None, tmp_path: Path
) -> None:
    run = RunDirectory(path=tmp_path / "run")
    for folder in (run.generations, run.throughput):
        folder.mkdir(parents=True)
    manifest = replace(MANIFEST, semantic={**MANIFEST.semantic, "model.dtype": "float32", **FROM_FILE, **settings})
    write_json(run.manifest, manifest.to_json(), exclusive=True)
    plan = [
        PlannedRequest(row_id="0", row_index=0, sample_index=0, block=0, micro_batch=0, position=0, num_prompt_tokens=3)
    ]
    publish_plan(run.plan, plan)
    store = PartStore(directory=run, manifest=manifest, plan=plan, columns=infer_column_schema([row]))
    store.commit(0, [GenerationRow(id="0", sample_index=0, status="ok", completion="5", columns=row)], PASSES)
    [sample] = good_rows(figures_of(run.path), 1)
    assert sample.prompt == prompt
    assert (note in (sample.note or "")) if note is not None else sample.note is None
    text = "\n".join(page(run.path, tmp_path).texts)
    assert all(each in text for each in (prompt, sample.note) if each is not None)
    assert "float32" in text.partition("Fixed for the whole run")[2], "nobody has changed it"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"dataset.kind": "csv", "dataset.path": "rows.csv"}, "dataset.kind"),
        ({"dataset.kind": "prompt", "dataset.prompt": "Hi", "dataset.path": None}, "dataset.kind"),
        ({"sampling.follow_model": True, "sampling.temperature": 0.6}, "sampling.temperature"),
        ({"sampling.max_new_tokens": 0, "sampling.logprobs": 1}, "sampling.logprobs"),
    ],
)
def test_what_the_job_chose_is_not_shown_as_changed(settings: dict[str, JsonValue], key: str, tmp_path: Path) -> None:
    case = ShardedRun(folder=tmp_path, identity={"model.name": "tiny", **settings}).finish(0)
    changed, _, rest = page(case.directory(0).path, tmp_path).text.partition("as by default")
    assert key not in changed
    assert key in rest.partition("Fixed for the whole run")[2]


def test_a_kind_that_the_name_of_the_file_does_not_tell_is_changed(tmp_path: Path) -> None:
    identity: dict[str, object] = {"dataset.kind": "csv", "dataset.path": "rows.txt"}
    case = ShardedRun(folder=tmp_path, identity=identity).finish(0)
    assert "dataset.kindcsv" in page(case.directory(0).path, tmp_path).text.partition("as by default")[0]


def test_memory_that_no_pass_has_measured_is_unknown(tmp_path: Path) -> None:
    case = ShardedRun(folder=tmp_path).finish(0, passes=PASSES)
    text = page(case.directory(0).path, tmp_path).text
    assert "peak host memoryunknown" in text
    assert "0 B" not in text.partition("Settings")[0]


def test_a_scored_run_has_samples_without_a_completion(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path / "run")
    for folder in (run.generations, run.throughput):
        folder.mkdir(parents=True)
    write_json(run.manifest, MANIFEST.to_json(), exclusive=True)
    plan = [
        PlannedRequest(row_id="0", row_index=0, sample_index=0, block=0, micro_batch=0, position=0, num_prompt_tokens=3)
    ]
    publish_plan(run.plan, plan)
    fixed = score_schema(has_top=False)
    columns = infer_column_schema([{"prompt": "2+2", "completion": "4"}], fixed)
    store = PartStore(directory=run, manifest=MANIFEST, plan=plan, columns=columns, fixed_schema=fixed)
    row = GenerationRow(id="0", sample_index=0, status="ok", columns={"prompt": "2+2", "completion": "4"})
    store.commit(0, [row], PASSES)
    [sample] = good_rows(figures_of(run.path), 1)
    assert (sample.prompt, sample.completion, sample.num_prompt_tokens) == ("prompt: 2+2\ncompletion: 4", None, 3)
    assert "completion: 4" in "\n".join(page(run.path, tmp_path).texts)


def test_samples_are_spread_over_the_run_and_as_many_as_asked(tmp_path: Path) -> None:
    case = ShardedRun(folder=tmp_path).finish(0)
    figures = figures_of(case.directory(0).path)
    for count in (1, 3, 4, 9, 16, 40):
        rows = good_rows(figures, count)
        assert len({(row.row_index, row.completion, id(row)) for row in rows}) == min(count, 16)
    assert len({row.row_index for row in good_rows(figures, 4)}) > 1


def test_a_damaged_run_and_one_without_a_row_have_a_page(tmp_path: Path) -> None:
    case = ShardedRun(folder=tmp_path).finish(0, 1)
    case.directory(0).generations_part(0).write_bytes(b"PAR1")
    assert "part-00000.parquet is damaged" in page(case.directory(0).path, tmp_path).text
    shutil.rmtree(case.directory(1).generations)
    case.directory(1).success.unlink()
    text = page(case.directory(1).path, tmp_path).text
    assert "interrupted" in text
    assert "Throughput over time" not in text


def test_the_page_is_in_the_run_where_no_directory_is_named(tmp_path: Path) -> None:
    case = ShardedRun(folder=tmp_path).finish(0)
    path = write_page(figures_of(case.directory(0).path), 0, None)
    assert path == case.directory(0).path / "report.html"
    assert "Samples" not in path.read_text()
    assert figures_of(case.directory(0).path).state == "done"
