"""Prometheus' text format of metrics, for files of node_exporter's textfile collector and for servers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TEXT_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
LABEL_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass(frozen=True, kw_only=True)
class MetricFamily:
    """A metric. `samples`: labels and value of each; without samples the metric is left out. A name that ends in
    `_total` is a counter, any other a gauge."""

    name: str
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def format_metrics(families: Iterable[MetricFamily]) -> str:
    """The metrics as text, in the given order; names and sets of labels must be distinct."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines.append(f"# HELP {family.name} {family.help.translate(TEXT_ESCAPES)}")
            lines.append(f"# TYPE {family.name} {family.kind}")
            lines += [f"{family.name}{_format_labels(labels)} {value:.17g}" for labels, value in family.samples]
    return "\n".join([*lines, ""])


def _format_labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{value.translate(LABEL_ESCAPES)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""
