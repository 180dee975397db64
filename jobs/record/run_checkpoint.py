"""The checkpoint of a run: finished rows that are in no part yet, and unfinished sequences.

The file is running.parquet or, if blocks run one after the other (in waves), running-<block>.parquet. It is optional:
without a valid checkpoint, these requests restart from their prompts.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from runtime.errors import OutputError
from runtime.library.columns import LOGPROB_FIELDS, clean_text

from ..files.publishing import (
    PARQUET_PROBLEMS,
    canonical_json,
    move_to_quarantine,
    output_error,
    parse_parquet,
    publish,
    read_regular_file,
    write_parquet,
)
from ..files.row_digest import is_signed, require_intact, sign
from .manifest import RunManifest
from .output_rows import COMPLETION_FIELDS, GenerationRow
from .passes import PassRow
from .plan_file import PlannedRequest, plan_digest
from .run_dir import RunDirectory

if TYPE_CHECKING:  # readers of runs must not load torch
    from runtime.sequences.beams import BeamState
    from runtime.sequences.sequence import BeamTrace, SequenceState


LOG = logging.getLogger(__name__)
FORMAT = "1"
UNFINISHED = "running"  # status of an unfinished sequence
UNFINISHED_COLUMNS = frozenset({"generator_state", "search"})  # random generator, beam search; null if finished

RequestKey: TypeAlias = tuple[str, int]  # id and sample index
CheckpointRow: TypeAlias = dict[str, Any]  # a row of CHECKPOINT_SCHEMA

CHECKPOINT_SCHEMA = pa.schema(
    [
        *COMPLETION_FIELDS,
        *LOGPROB_FIELDS,
        pa.field("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("generator_state", pa.binary()),
        pa.field("beam_score", pa.float64()),
        pa.field("search", pa.binary()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class RunCheckpoint:
    """The content of a checkpoint. `finished`: rows without the columns of the input. `passes`: passes that are in no
    part yet. `num_stops`: how often the block was interrupted."""

    finished: Sequence[GenerationRow] = ()
    unfinished: "Mapping[RequestKey, SequenceState]"
    passes: Sequence[PassRow] = ()
    num_stops: int = 0


@dataclass(frozen=True, kw_only=True)
class RunCheckpointFile:
    """The checkpoint file of a run, or of one `block`. The caller holds the run's lock."""

    directory: RunDirectory
    manifest: RunManifest
    plan: Sequence[PlannedRequest]
    block: int | None = None

    @property
    def path(self) -> Path:
        return self.directory.run_checkpoint if self.block is None else self.directory.block_checkpoint(self.block)

    def save(self, checkpoint: RunCheckpoint) -> bool:
        """Replaces the previous checkpoint. If it cannot be written, logs a warning and returns False."""
        rows = [
            {
                **{name: getattr(row, name) for name in CHECKPOINT_SCHEMA.names if hasattr(row, name)},
                "completion": clean_text(row.completion),
                "error": None if row.error is None else clean_text(row.error),
            }
            for row in checkpoint.finished
        ]
        rows += [
            {
                "id": row_id,
                "sample_index": sample_index,
                "status": UNFINISHED,
                "completion": "",
                "token_ids": unfinished.token_ids,
                "logprobs": [token.own for token in unfinished.logprobs],
                "top_token_ids": [token.top_ids for token in unfinished.logprobs],
                "top_logprobs": [token.top for token in unfinished.logprobs],
                "generator_state": unfinished.generator_state,
                "search": serialize_search(unfinished.search),
            }
            for (row_id, sample_index), unfinished in checkpoint.unfinished.items()
        ]
        values = {
            **self._identity,
            "passes": canonical_json([vars(row) for row in checkpoint.passes]),
            "num_stops": str(checkpoint.num_stops),
        }
        footer = {f"weightstream.{key}".encode(): value.encode() for key, value in values.items()}
        table = sign(pa.Table.from_pylist(rows, schema=CHECKPOINT_SCHEMA), footer)
        try:
            return publish(
                self.path,
                lambda file: write_parquet(table, file),
                exclusive=False,
                expected_bytes=table.nbytes,
            )
        except OutputError as error:
            LOG.warning("the checkpoint was not saved: %s", error)
            return False

    def load(self) -> RunCheckpoint:
        """Reads the last checkpoint. Returns an empty one if the file is missing or unusable. Moves an unusable file to
        `quarantine/` with a warning."""
        path = self.path
        try:
            data, _ = read_regular_file(path)
        except FileNotFoundError:
            return RunCheckpoint(unfinished={})
        except OSError as error:
            LOG.warning("%s cannot be read (%s): its requests restart", path, error)
            return RunCheckpoint(unfinished={})
        try:
            return self._parse(data)
        except (*PARQUET_PROBLEMS, TypeError) as error:  # TypeError: passes of another version of Weightstream
            try:
                move_to_quarantine(path, self.directory.quarantine, f"{error}; its requests restart")
            except OSError as fault:
                LOG.warning("%s cannot be used (%s) or moved to quarantine: %s", path, error, fault)
            return RunCheckpoint(unfinished={})

    def remove(self) -> None:
        """Removes the checkpoint, because all its rows are in parts. If removing fails, its rows are ignored later."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            LOG.warning("%s is no longer needed but cannot be removed: %s", self.path, error)

    def _parse(self, data: bytes) -> RunCheckpoint:
        """Reads a checkpoint. Raises one of PARQUET_PROBLEMS, or TypeError, if it is damaged or of another run."""
        table = parse_parquet(data)
        footer = table.schema.metadata or {}
        values = {key.decode().removeprefix("weightstream."): value.decode() for key, value in footer.items()}
        wrong = [key for key, value in self._identity.items() if values.get(key) != value]
        if wrong:
            raise ValueError(f"it belongs to another run: {', '.join(wrong)} differ")
        if not table.schema.equals(CHECKPOINT_SCHEMA):
            raise ValueError("its columns differ from a checkpoint's")
        if not is_signed(table):
            raise ValueError("it has no digest of its rows")
        require_intact(table)
        rows: list[CheckpointRow] = table.to_pylist()
        return RunCheckpoint(
            finished=[
                GenerationRow(**{key: value for key, value in row.items() if key not in UNFINISHED_COLUMNS})
                for row in rows
                if row["status"] != UNFINISHED
            ],
            unfinished={
                (row["id"], row["sample_index"]): _parse_unfinished(row) for row in rows if row["status"] == UNFINISHED
            },
            passes=[PassRow(**row) for row in json.loads(values["passes"])],
            num_stops=int(values["num_stops"]),
        )

    @cached_property
    def _identity(self) -> dict[str, str]:
        plan, block = plan_digest(self.plan), {} if self.block is None else {"block": str(self.block)}
        return {"format": FORMAT, "run": self.manifest.name, "config": self.manifest.digest, "plan": plan, **block}


def remove_checkpoints(directory: RunDirectory, blocks: Iterable[int]) -> None:
    """Removes checkpoints of blocks that are done, of a process that was killed before it removed them. Raises
    OutputError."""
    for path in map(directory.block_checkpoint, blocks):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise output_error(path, error) from error


def _parse_unfinished(values: CheckpointRow) -> "SequenceState":
    from runtime.sequences.sequence import SequenceState, TokenLogprobs

    logprobs = zip(values["logprobs"], values["top_token_ids"], values["top_logprobs"], strict=True)
    return SequenceState(
        token_ids=tuple(values["token_ids"]),
        logprobs=tuple(TokenLogprobs(own=own, top_ids=tuple(ids), top=tuple(top)) for own, ids, top in logprobs),
        generator_state=values["generator_state"],
        search=parse_search(values["search"]),
    )


def serialize_search(state: "BeamState[BeamTrace] | None") -> bytes | None:
    """The state of a beam search as JSON, for `parse_search`."""
    return None if state is None else json.dumps(asdict(state), default=lambda reason: reason.value).encode()


def parse_search(data: bytes | None) -> "BeamState[BeamTrace] | None":
    """The state of a beam search from JSON of `serialize_search`. Raises ValueError, KeyError or TypeError."""
    if data is None:
        return None
    from runtime.sequences.beams import BeamState, Hypothesis

    values = json.loads(data)
    hypotheses = (Hypothesis(score=item["score"], way=_read_beam_trace(item["way"])) for item in values["hypotheses"])
    return BeamState(scores=tuple(values["scores"]), hypotheses=tuple(hypotheses))


def _read_beam_trace(values: Mapping[str, Any] | None) -> "BeamTrace | None":
    from runtime.sequences.sequence import BeamTrace, FinishReason, TokenLogprobs

    if values is None:
        return None
    logprobs = (
        TokenLogprobs(own=token["own"], top_ids=tuple(token["top_ids"]), top=tuple(token["top"]))
        for token in values["logprobs"]
    )
    return BeamTrace(
        token_ids=tuple(values["token_ids"]),
        finish=FinishReason(values["finish"]),
        text_end=values["text_end"],
        logprobs=tuple(logprobs),
    )
