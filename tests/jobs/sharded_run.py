"""What the tests of finished runs share: a run of three shards without a model, with rows of every kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs.files.publishing import JsonValue, write_json
from jobs.record.manifest import RunManifest
from jobs.record.output_rows import GenerationRow, infer_column_schema
from jobs.record.parts import PartStore
from jobs.record.passes import PassRow
from jobs.record.plan_file import PlannedRequest, publish_plan
from jobs.record.run_dir import RunDirectory

NUM_ROWS, NUM_SHARDS, NUM_BLOCKS = 24, 3, 4
COLUMNS = [
    {
        "tags": ["x", f"y{i}"] if i % 3 else [],
        "meta": {"at": i, "wörter": "日本\u2028\n\"'"},
        "mixed": [5, "5", None, [1]][i % 4],
        "numbers": [i, i / 2],
        "empty": {},
        "completion": i,
    }
    for i in range(NUM_ROWS)
]


@dataclass(frozen=True, kw_only=True)
class ShardedRun:
    """A run of `NUM_SHARDS` shards without a model: two samples of each row, row 5 an error, blocks by length."""

    folder: Path
    identity: dict[str, object] = field(default_factory=lambda: {"model.name": "tiny", "sampling.n": 2})

    def directory(self, index: int) -> RunDirectory:
        return RunDirectory(path=self.folder / f"x-{index:05d}-of-{NUM_SHARDS:05d}")

    def store(self, index: int) -> PartStore:
        directory = self.directory(index)
        for each in (directory.generations, directory.throughput):
            each.mkdir(parents=True, exist_ok=True)
        semantic = {**self.identity, "shard.index": index, "shard.count": NUM_SHARDS, "input": f"of {index}"}
        operational: dict[str, JsonValue] = {"offload.tier": "nvme", "output_root": "<o>"}
        manifest = RunManifest(semantic=semantic, operational=operational, versions={"weightstream": "0.1.0"})  # pyright: ignore[reportArgumentType]
        write_json(directory.manifest, manifest.to_json(), exclusive=False)
        plan = planned(index)
        publish_plan(directory.plan, plan)
        return PartStore(directory=directory, manifest=manifest, plan=plan, columns=infer_column_schema(COLUMNS))

    def finish(self, *indexes: int, passes: Sequence[PassRow] = ()) -> "ShardedRun":
        """`passes`: of each block."""
        for index in indexes:
            store = self.store(index)
            for block, requests in store.blocks.items():
                store.commit(block, [row_of(request) for request in requests], passes)
            store.publish_success()
        return self


def planned(shard: int) -> list[PlannedRequest]:
    keys = [(row, sample) for row in range(shard, NUM_ROWS, NUM_SHARDS) for sample in (0, 1)]
    keys.sort(key=lambda key: (key[0] * 7) % NUM_ROWS)  # blocks take rows by length, not by place
    return [
        PlannedRequest(
            row_id=f"ä{row}", row_index=row, sample_index=sample, block=place * NUM_BLOCKS // len(keys),
            micro_batch=0, position=place, num_prompt_tokens=9,
        )
        for place, (row, sample) in enumerate(keys)
    ]  # fmt: skip


def row_of(request: PlannedRequest) -> GenerationRow:
    is_bad = request.row_index == 5
    return GenerationRow(
        id=request.row_id,
        sample_index=request.sample_index,
        status="error" if is_bad else "ok",
        completion="" if is_bad else f'ünï, "{request.row_index}"\n\u2028',
        token_ids=[] if is_bad else [request.row_index, 2],
        finish_reason=None if is_bad else "eos",
        error="line 5: no JSON" if is_bad else None,
        columns=COLUMNS[request.row_index],
        source_file="a.jsonl" if request.row_index < 10 else "b.jsonl",
    )
