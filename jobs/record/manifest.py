"""The identity of a run in run.json: settings, and digests of model and input.

When a run is started again, its identity must be the same.
"""

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
WEIGHTS_DIGEST_SUFFIX = " sha256"  # after the file name, in the key of a digest of weights
JUDGE_PATH_KEYS = (
    "dataset.answers_path",
    "dataset.baseline_path",
    "dataset.references_path",
    "dataset.judge_prompts_path",
)
# Paths may change between starts: digests identify the contents.
PATH_KEYS = ("model.path", "model.tokenizer", "dataset.path", *JUDGE_PATH_KEYS)

Values: TypeAlias = Mapping[str, JsonValue]  # by dotted key, such as `model.path`


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """The identity of a run, and what else run.json has.

    - `semantic`: settings that can change the output, and digests of the files that they name
    - `facts`: values in files that can change the output, such as `config.json rms_norm_eps`
    - `operational`: settings that may differ when the run is resumed; also stored with each block's measured passes
    - `versions`: of Weightstream and libraries; a change is logged
    - `defaults`: the default settings, for keys that an older run.json does not have
    - `sources`: the file or directory that a value comes from, by key or by the key's first word; for messages
    """

    semantic: Values
    operational: Values
    versions: Mapping[str, str]
    facts: Values = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> Values:
        """All values that must be the same when the run is resumed."""
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
        """This manifest with the recorded identity, that of `stored`: new parts get the same footer as older ones.
        `stored`: the content of run.json at `path`. Raises RunMismatchError with a diff if the identities differ,
        DamagedRunError if `stored` was edited. Logs differences due to library versions."""
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


def run_name(identity: Values) -> str:
    """A name for a run: `<model>-<data set>-<first 8 characters of the digest>`."""
    values = [identity.get(f"{group}.name", identity.get(group)) for group in ("model", "dataset")]
    names = [value.rstrip("/").rpartition("/")[2].lower() for value in values if isinstance(value, str)]
    words = [re.sub(r"[^a-z0-9._]+", "-", name)[:32].strip("-._") for name in names]
    return "-".join([*(word for word in words if word), json_digest(identity)[:8]])


def _require_same_identity(run: Path, recorded: RunManifest, current: RunManifest, version_lines: list[str]) -> None:
    """Raises RunMismatchError if the identities differ. `version_lines`: changed versions, which are logged."""
    for line in version_lines:
        LOG.warning("%s was started with other library versions; rounding may differ: %s", run, line)
    old_values, values, defaults = recorded.identity, current.identity, current.defaults
    # A setting that the run does not have yet, because it was added later, may only have its default.
    new = {key: value for key, value in current.semantic.items() if key not in old_values and key in defaults}
    default_keys = {key for key, value in new.items() if canonical_json(defaults[key]) == canonical_json(value)}
    unrecorded = _unrecorded_digests(run, old_values, values)
    compared = {key: value for key, value in values.items() if key not in default_keys | unrecorded}
    lines = _diff(old_values, compared, current.sources)
    if any(line.startswith("transformers:") for line in version_lines):
        # Another version of transformers may have more or fewer keys in a model's config.
        config_key_lines = [line for line in lines if ABSENT in line and _is_from_json(line)]
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
    """The keys of digests of weights, if the run has none because of model.verify=sampled. Logs a warning then."""
    if any(map(_is_weights_digest, old_values)):
        return set()
    keys = {key for key in new_values if _is_weights_digest(key)}
    if keys:
        LOG.warning(
            "%s was started with model.verify=sampled: changes in unsampled bytes of its weights cannot be detected",
            run,
        )
    return keys


def _is_from_json(text: str) -> bool:
    """True if the first word names a JSON file. `text`: a key, or a line of `_diff`, which begins with a key."""
    return text.partition(" ")[0].endswith(".json")


def _is_weights_digest(key: str) -> bool:
    """True for the digest of a file of weights. Names of input files may end with the same suffix."""
    return key.endswith(WEIGHTS_DIGEST_SUFFIX) and not key.startswith("input ") and not _is_from_json(key)


def _diff(old_values: Values, new_values: Values, sources: Mapping[str, str] | None = None) -> list[str]:
    """A line for each value that differs: key, old and new value, and source."""
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
