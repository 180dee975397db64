"""What the tests of parts share: a small plan, its rows, and a store for them."""

import math
from collections.abc import Sequence
from pathlib import Path

from jobs.record.manifest import RunManifest
from jobs.record.output_rows import GenerationRow, infer_column_schema
from jobs.record.parts import PartStore
from jobs.record.passes import PassRow
from jobs.record.plan_file import PlannedRequest
from jobs.record.run_dir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = RunManifest(
    semantic={"model.name": "tiny"}, operational={"offload.tier": "nvme"}, versions={"torch": "2.13"}
)
PLAN = [
    PlannedRequest(
        row_id=f"row {index}",
        row_index=index,
        sample_index=sample,
        block=(2 * index + sample) // 4,
        micro_batch=sample,
        position=index,
        num_prompt_tokens=10 + index,
        status="rejected" if index == 5 else "planned",
    )
    for index in (2, 0, 1, 4, 5, 3)
    for sample in (0, 1)
]
PASSES = [
    PassRow(
        pass_index=index,
        phase="decode" if index else "prefill",
        num_sequences=4,
        real_tokens=4,
        padded_tokens=4,
        prompt_tokens=0 if index else 4,
        issued_tokens=4,
        useful_tokens=3,
        seconds=0.5,
        prefetch_hits=3,
        prefetch_misses=1,
        experts_total=160,
        experts_hit=40,
        experts_read=56,
        bytes_written_disk=4096,
        stage_read_seconds=[0.0, 0.25, 0.125],
        stage_attention_seconds=[0.0, 0.5],
        started_at=1e9,
        since_start_seconds=3.0 + index,
    )
    for index in range(2)
]


def columns_of(request: PlannedRequest) -> dict[str, object]:
    score = math.nan if request.row_index == 1 else 0.5
    return {
        "id": f"own {request.row_index}",
        "score": score,
        "turns": ["a", {"b": request.row_index}],
        "text": "ä\ud800",
    }


def row_of(request: PlannedRequest) -> GenerationRow:
    if request.status == "rejected":
        return GenerationRow(
            id=request.row_id, sample_index=request.sample_index, status="error", error="line 5: no JSON"
        )
    tokens = [request.row_index, request.sample_index, 2]
    return GenerationRow(
        id=request.row_id,
        sample_index=request.sample_index,
        status="ok",
        completion=f"text {tokens}",
        token_ids=tokens,
        finish_reason="eos",
        columns=columns_of(request),
    )


def rows_of(block: int) -> list[GenerationRow]:
    return [row_of(request) for request in PLAN if request.block == block]


def store_at(path: Path, *, manifest: RunManifest = MANIFEST, plan: Sequence[PlannedRequest] = PLAN) -> PartStore:
    run = RunDirectory(path=path)
    for folder in (run.generations, run.throughput):
        folder.mkdir(parents=True, exist_ok=True)
    columns = infer_column_schema(columns_of(request) for request in plan)
    return PartStore(directory=run, manifest=manifest, plan=plan, columns=columns)


def committed_store(path: Path) -> PartStore:
    store = store_at(path)
    for block in store.blocks:
        assert store.commit(block, rows_of(block), PASSES)
    return store


def parts(store: PartStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.directory.generations.iterdir())}


def quarantined(store: PartStore) -> list[Path]:
    return sorted(store.directory.quarantine.iterdir()) if store.directory.quarantine.exists() else []


# --- what a part holds
