"""The settings of a run from the view of its user: those that the job chose, those without effect, and those in which
runs differ."""

from collections.abc import Mapping, Sequence

from ..config.settings import GenerateConfig
from ..config.typed import flatten
from ..datasets.config import KINDS
from ..datasets.files import kind_from_suffix
from ..files.publishing import JsonValue, canonical_json

# No effect on speed, or derived from other settings.
IGNORED_SETTINGS = frozenset({"shard.index", "shard.count", "input", "output_root", "run", "log_level"})
FROM_MODEL = (
    "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "stop",
)  # fmt: skip
DATASET_KEYS = frozenset[str]().union(*(kind.keys for kind in KINDS.values()))  # those of some kinds only


def resolved_settings(settings: Mapping[str, JsonValue]) -> set[str]:
    """Settings whose values may be a choice of the job instead of the user: it resolves `auto`, takes settings from the
    model's files, finds the kind of a file by its name, and scores with settings of its own."""
    resolved, path = {"model.dtype"}, settings.get("dataset.path")
    if settings.get("sampling.follow_model") is True:
        resolved |= {f"sampling.{name}" for name in FROM_MODEL}
    if settings.get("sampling.max_new_tokens") == 0:
        resolved |= {"sampling.max_new_tokens", "sampling.logprobs"}
    if settings.get("dataset.kind") == ("prompt" if path is None else kind_from_suffix(str(path))):
        resolved.add("dataset.kind")
    return resolved


def unused_settings(settings: Mapping[str, JsonValue]) -> set[str]:
    """Settings of the data set without effect in a run."""
    dataset = {key.removeprefix("dataset."): value for key, value in settings.items() if key.startswith("dataset.")}
    kind = KINDS.get(str(dataset.get("kind")))
    unused = set[str](DATASET_KEYS - kind.keys if kind is not None else ())
    if kind is not None and kind.has_chats:
        unused.add("chat_template")
    if dataset.get("few_shot_path") is None and kind is not None and "few_shot_path" in kind.keys:
        unused |= {"few_shot_template", "num_examples", "trial"}
    if any(dataset.get(name) is not None for name in ("template", "messages_field", "turns_field")):
        unused.add("prompt_field")
    return {f"dataset.{name}" for name in unused}


def differing_keys(runs: Sequence[Mapping[str, JsonValue]]) -> list[str]:
    """Keys with different values, in the order of the config. A key that is missing or has no effect counts as its
    default, and so does the kind of a file that its name tells."""
    defaults = flatten(GenerateConfig())
    values = [{**defaults, **effective_settings(settings)} for settings in runs]
    keys = dict.fromkeys(key for each in (defaults, *runs) for key in each if key not in IGNORED_SETTINGS)
    return [key for key in keys if len({canonical_json(each.get(key)) for each in values}) > 1]


def effective_settings(settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The settings that have an effect of their own."""
    without = unused_settings(settings) | (resolved_settings(settings) & {"dataset.kind"})
    return {key: value for key, value in settings.items() if key not in without}
