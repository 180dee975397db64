"""Identity of a run in run.json: its settings and digests of model and input, compared on each start."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from runtime.errors import DamagedRunError, RunMismatchError
from runtime.units import format_count

from ..files.publishing import JsonValue, canonical_json, json_digest

LOG = logging.getLogger(__name__)
FORMAT = 3
MAX_DIFF_LINES = 20
MAX_VALUE_CHARS = 80
ABSENT = "(absent)"
WEIGHTS_DIGEST_SUFFIX = " sha256"  # a key is a file name with this suffix
WEIGHTS = "SHA-256 of weights"
JUDGE_PATH_KEYS = (
    "dataset.answers_path",
    "dataset.baseline_path",
    "dataset.references_path",
    "dataset.judge_prompts_path",
)
# Files may move: digests identify their contents.
PATH_KEYS = ("model.path", "model.tokenizer", "dataset.path", *JUDGE_PATH_KEYS)

Values: TypeAlias = Mapping[str, JsonValue]


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """`semantic`: settings that can change the output, by dotted key, and digests of the files they name. `facts`:
    values of files that can change the output, such as `config.json rms_norm_eps`. Both must be equal on resume.

    `operational`: settings that may change; recorded in each throughput part. `versions`: of Weightstream and
    libraries; a change is logged. `defaults`: default settings, for keys missing from an older run.json. `sources`:
    file or directory that a value comes from, by its key or the key's first word; for messages.
    """

    semantic: Values
    operational: Values
    versions: Mapping[str, str]
    facts: Values = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> Values:
        return {**self.semantic, **self.facts}

    @property
    def digest(self) -> str:
        return json_digest(self.identity)

    @property
    def name(self) -> str:
        return run_name(self.identity)

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "format": FORMAT,
            "name": self.name,
            "semantic": self.semantic,
            "facts": self.facts,
            "semantic_digest": self.digest,
            "operational": self.operational,
            "versions": self.versions,
        }

    def with_stored_identity(self, stored: Values, path: Path) -> "RunManifest":
        """This manifest with the identity of `stored`, the run.json at `path`, as in the footers of parts. Raises
        RunMismatchError with a diff if the runs differ, DamagedRunError if `stored` was edited. Logs differences due to
        library versions."""
        groups = (stored.get(key) for key in ("semantic", "facts", "versions"))
        semantic, facts, versions = (group if isinstance(group, dict) else {} for group in groups)
        number = stored.get("format")
        if number != FORMAT:
            raise RunMismatchError(
                f"{path} has format {json.dumps(number)}, this version of Weightstream reads {FORMAT}. "
                f"Finish the run with the version that started it, or choose another directory with run="
            )
        if not semantic or stored.get("semantic_digest") != json_digest({**semantic, **facts}):
            raise DamagedRunError(f"{path} was changed after it was written: its digest does not match its settings")
        recorded = replace(self, semantic=semantic, facts=facts)
        known_versions = {name: version for name, version in self.versions.items() if name in versions}
        _require_same_identity(path.parent, recorded, self, _diff(versions, known_versions))
        return recorded


def run_name(semantic: Values) -> str:
    """`<model>-<data set>-<8 hex of the digest>`."""
    values = [semantic.get(f"{group}.name", semantic.get(group)) for group in ("model", "dataset")]
    names = [value.rstrip("/").rpartition("/")[2].lower() for value in values if isinstance(value, str)]
    words = [re.sub(r"[^a-z0-9._]+", "-", name)[:32].strip("-._") for name in names]
    return "-".join([*(word for word in words if word), json_digest(semantic)[:8]])


def _require_same_identity(run: Path, recorded: RunManifest, current: RunManifest, version_lines: list[str]) -> None:
    for line in version_lines:
        LOG.warning("%s was started with other library versions; rounding may differ: %s", run, line)
    old_values, values, defaults = recorded.identity, current.identity, current.defaults
    new = {key: value for key, value in current.semantic.items() if key not in old_values and key in defaults}
    default_keys = {key for key, value in new.items() if canonical_json(defaults[key]) == canonical_json(value)}
    unrecorded = _unrecorded_digests(run, old_values, values)
    compared = {key: value for key, value in values.items() if key not in default_keys | unrecorded}
    lines = _diff(old_values, compared, current.sources)
    if any(line.startswith("transformers:") for line in version_lines):
        # Another version of transformers may have more or fewer keys in a model's config.
        config_key_lines = [line for line in lines if ABSENT in line and _fact_source(line).endswith(".json")]
        for line in config_key_lines:
            LOG.warning("%s: a config key added or removed by another transformers version: %s", run, line)
        lines = [line for line in lines if line not in config_key_lines]
    if not lines:
        return
    shown = [f"  {line}" for line in lines[:MAX_DIFF_LINES]]
    more = [f"  and {len(lines) - MAX_DIFF_LINES} more"] if len(lines) > MAX_DIFF_LINES else []
    verb = "differs" if len(lines) == 1 else "differ"
    head = f"{run} belongs to another run; {format_count(len(lines), 'value')} {verb} (key: was -> is):"
    tail = "Nothing was written. Restore the values, or choose another directory with run="
    raise RunMismatchError("\n".join([head, *shown, *more, tail]))


def _unrecorded_digests(run: Path, old_values: Values, new_values: Values) -> set[str]:
    """Keys of weight digests that the run does not record because of model.verify=sampled. Logs that."""
    if any(_fact_source(key) == WEIGHTS for key in old_values):
        return set()
    keys = {key for key in new_values if _fact_source(key) == WEIGHTS}
    if keys:
        LOG.warning(
            "%s was started with model.verify=sampled: changes in unsampled bytes of its weights cannot be detected",
            run,
        )
    return keys


def _fact_source(key: str) -> str:
    """The file or kind of a fact, for messages."""
    first, _, _ = key.partition(" ")
    if first.endswith(".json") or first == "input":
        return "input columns" if first == "input" else first
    return WEIGHTS if key.endswith(WEIGHTS_DIGEST_SUFFIX) else key


def _diff(old_values: Values, new_values: Values, sources: Mapping[str, str] | None = None) -> list[str]:
    sources, lines = sources or {}, list[str]()
    for key in sorted({*old_values, *new_values}):
        old, new = _format_value(old_values, key), _format_value(new_values, key)
        if old != new:
            source = sources.get(key, sources.get(key.partition(" ")[0]))
            lines.append(
                f"{key}: {_truncate(old)} -> {_truncate(new)}" + ("" if source is None else f"  (from {source})")
            )
    return lines


def _format_value(values: Values, key: str) -> str:
    return canonical_json(values[key]) if key in values else ABSENT


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
