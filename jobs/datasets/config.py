"""Which prompts a run answers: `KINDS` says of each kind how it is read and which keys it knows, and `read_rows` reads.
`conf/dataset/*.yaml` mirrors `DatasetConfig` key for key.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path

from runtime.errors import DatasetError, require

from .fields import MAX_ROWS, DatasetFields
from .jsonl import read_jsonl, read_jsonl_path
from .row_rules import CountTokens, read_prompts, read_questions, read_reasoning, read_summarization
from .rows import Row, number_rows, refuse_bad_rows, repeat_rows, resolve_duplicates, warn_of_empty_fields
from .tables import read_csv, read_hub, read_parquet

SAMPLE_PATH = Path(__file__).parents[1] / "data" / "sample.jsonl"


class DatasetKind(Enum):
    sample = "sample"
    mtbench = "mtbench"
    helm_synthetic_reasoning = "helm_synthetic_reasoning"
    helm_summarization = "helm_summarization"
    jsonl = "jsonl"
    parquet = "parquet"
    csv = "csv"
    hub = "hub"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How one kind of data set becomes rows. `keys` are those that it knows of the keys which not every kind knows."""

    rows: Callable[[DatasetFields, CountTokens | None], Iterator[Row]]  # a row rule, and what reads its records
    keys: frozenset[str] = frozenset()
    needs: str = "dataset.path=<file or directory>"  # what is said where `path` is known and missing


_TABLE = frozenset({"path", "prompt_field", "id_field", "max_new_tokens_field", "temperature_field", "stop_field"})
_HELM = frozenset({"trial", "num_examples"})

KINDS = {
    DatasetKind.sample: Kind(rows=partial(read_questions, lambda config: read_jsonl(str(SAMPLE_PATH)))),
    DatasetKind.mtbench: Kind(
        rows=partial(read_questions, read_jsonl_path),
        keys=frozenset({"path"}),
        needs="dataset.path=question.jsonl (MT-Bench's questions; they are not bundled)",
    ),
    DatasetKind.helm_synthetic_reasoning: Kind(rows=read_reasoning, keys=_HELM | {"mode"}),
    DatasetKind.helm_summarization: Kind(
        rows=read_summarization,
        keys=_HELM
        | {"path", "id_field", "json_field", "examples_path", "article_field", "summary_field"}
        | {"window_tokens", "reserve_tokens"},
        needs="dataset.path=articles.jsonl (articles with summaries; they are not bundled)",
    ),
    DatasetKind.jsonl: Kind(
        rows=partial(read_prompts, read_jsonl_path), keys=_TABLE | {"messages_field", "json_field"}
    ),
    DatasetKind.parquet: Kind(rows=partial(read_prompts, read_parquet), keys=_TABLE | {"messages_field"}),
    DatasetKind.csv: Kind(rows=partial(read_prompts, read_csv), keys=_TABLE | {"csv_delimiter"}),
    DatasetKind.hub: Kind(
        rows=partial(read_prompts, read_hub),
        keys=_TABLE | {"messages_field", "hub_config", "hub_split", "hub_revision"},
        needs="dataset.path=<hub id or local directory>",
    ),
}
_NOT_FOR_ALL = frozenset[str]().union(*(kind.keys for kind in KINDS.values()))


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(DatasetFields):
    """One data set. A key set for a kind that has no use for it is refused, so that no setting is silently ignored."""

    kind: DatasetKind = DatasetKind.sample

    def __post_init__(self) -> None:
        kind, name = KINDS[self.kind], f"dataset.kind={self.kind.value}"
        for field in fields(self):
            unused = field.name in _NOT_FOR_ALL - kind.keys
            is_set = getattr(self, field.name) != field.default
            require(not (unused and is_set), f"dataset.{field.name} has no meaning for {name}")
        require("path" not in kind.keys or bool(self.path), f"{name} needs {kind.needs}")
        super().__post_init__()


def read_rows(config: DatasetConfig, *, count_tokens: CountTokens | None = None) -> list[Row]:
    """All rows of a data set: limited, repeated, with distinct ids, in an order that only the input decides.

    `count_tokens` counts a prompt's tokens as the model will see it; needed for `dataset.window_tokens` only.
    Raises ConfigError when it is missing, DatasetError when the data set as a whole cannot be used: not there, not
    readable, empty, a column missing, ids that repeat (`dedupe=refuse`), a bad row (`on_bad_row=fail`).
    """
    rows = list(islice(KINDS[config.kind].rows(config, count_tokens), config.limit))
    if not rows:
        raise DatasetError(f"dataset.path={config.path} holds no rows (dataset.kind={config.kind.value})")
    require(
        len(rows) * config.repeat <= MAX_ROWS,
        f"dataset.repeat={config.repeat:,} times {len(rows):,} rows is above the {MAX_ROWS:,} that a run can have",
    )
    refuse_bad_rows(rows, config.on_bad_row)
    warn_of_empty_fields(rows, config)
    return number_rows(resolve_duplicates(repeat_rows(rows, config.repeat), config.dedupe))
