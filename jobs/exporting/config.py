"""Settings of `jobs.export`; conf/export.yaml mirrors them."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from runtime.config.texts import is_url, require_plain_url
from runtime.errors import require


class ExportFormat(Enum):
    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"
    openai_batch = "openai_batch"
    fastchat = "fastchat"


class ErrorRows(Enum):
    """Handling of error rows: keep them, drop them, or export only them."""

    keep = "keep"
    drop = "drop"
    only = "only"


SUFFIXES = ("jsonl", "csv", "parquet")
FOREIGN_FORMATS = (ExportFormat.openai_batch, ExportFormat.fastchat)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """All settings of `jobs.export`; mirrors conf/export.yaml."""

    run: str | list[str] | None = None
    out: str | None = None
    format: ExportFormat | None = None
    columns: list[str] | None = None
    errors: ErrorRows = ErrorRows.keep
    partial: bool = False
    wait: bool = False
    overwrite: bool = False
    csv_safe: bool = False

    def __post_init__(self) -> None:
        require(
            bool(self.runs) and all(self.runs), "run is not set: name a run's directory, e.g. run=outputs/generate/mine"
        )
        for name in self.runs:
            require_plain_url(name, "run")
        require(bool(self.out), "out is not set: name the file to write, e.g. out=answers.jsonl")
        require(not is_url(self.out), f"out={self.out} is a URL: name a local file")
        suffix = Path(self.out or "").suffix[1:]
        known = ", ".join(f".{name}" for name in SUFFIXES)
        require(
            self.format is not None or suffix in SUFFIXES,
            f"out={self.out} does not end in {known}: rename it, or set format={'|'.join(ExportFormat.__members__)}",
        )
        require(not (self.wait and self.partial), "wait=true waits for the whole run: remove partial=true")
        is_csv = self.effective_format is ExportFormat.csv
        require(
            is_csv or not self.csv_safe, f"csv_safe=true needs format=csv, got format={self.effective_format.value}"
        )
        columns = self.columns
        require(columns is None or bool(columns), "columns is empty: name some, or set null for all")
        is_foreign = self.format in FOREIGN_FORMATS
        require(columns is None or not is_foreign, f"columns is not supported for format={self.effective_format.value}")
        require(len(set(columns or [])) == len(columns or []), f"columns={columns} contains a column twice")

    @property
    def runs(self) -> list[str]:
        return [self.run] if isinstance(self.run, str) else self.run or []

    @property
    def effective_format(self) -> ExportFormat:
        return self.format or ExportFormat[Path(self.out or "").suffix[1:]]
