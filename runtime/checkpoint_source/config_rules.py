"""Validates config.json, and makes a safe copy of a checkpoint's directory for transformers.

The copy contains JSON settings without the keys that name code, and links to tokenizer and chat template files. It
contains no code, pickles or weights."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ..errors import CheckpointError
from ..store.json_object import JsonObject, JsonValue, read_json_object, require_regular, type_name
from ..units import MIB

# Keys that name code. transformers would load this code from the hub or the directory; only installed code may run.
_CODE = re.compile(
    r"auto_map|trust_remote_code|code_revision|custom_generate|use_kernels|kernel_config"
    r"|_?(?:attn|attention|experts|mlp)_implementation(?:_internal)?"
)
# Keys that change what a model's forward returns.
_OUTPUTS = re.compile(r"return_dict|use_return_dict|output_(?:attentions|hidden_states)|torchscript")
_LABELS = re.compile(r"num_labels|id2label|label2id|problem_type")  # removed unless the model is a classifier
_CLASSIFIER = "ForSequenceClassification"

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
# Files that the safe copy contains without the keys that name code.
VETTED = (CONFIG, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "processor_config.json")
# Suffixes of files that the safe copy links to.
VOCABULARIES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe"}
TEMPLATES = "additional_chat_templates"  # a directory of chat templates
MAX_SETTINGS_BYTES = 8 * MIB

MAX_INTEGER = 2**31 - 1
MAX_LABELS = 1_000_000  # transformers creates a name for each label
# The number of layers may not exceed the number of tensors, or this limit if that is higher: config.json may describe
# layers without weights, such as those of a vision tower.
MIN_LAYER_LIMIT = 256


@dataclass(frozen=True, kw_only=True)
class ConfigRule:
    """A check of the config.json values whose key matches `keys`. If a value is a list, each item is checked. Null is
    valid. `meaning` completes "must be ..." in error messages."""

    keys: re.Pattern[str]
    meaning: str
    is_valid: Callable[[JsonValue], bool]


def _integer_from(least: int) -> Callable[[JsonValue], bool]:
    return lambda value: type(value) is int and least <= value <= MAX_INTEGER


def _number_between(*, least: float, most: float = math.inf) -> Callable[[JsonValue], bool]:
    def is_between(value: JsonValue) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return least <= value <= most and value != math.inf

    return is_between


RULES = (
    ConfigRule(
        keys=re.compile(
            r"(?:\w+_)?hidden_(?:size|dim)|n_embd|d_model|vocab_size|(?:\w+_)?num_(?:\w+_)?heads|n_heads?"
            r"|(?:\w+_)?(?:attention|key_value)_heads|weight_block_size"
        ),
        meaning=f"a whole number from 1 to {MAX_INTEGER:,}",
        is_valid=_integer_from(1),
    ),
    ConfigRule(
        keys=re.compile(r"max_position_embeddings|max_sequence_length|n_positions"),
        meaning=f"a number from 1 to {MAX_INTEGER:,}",
        is_valid=_number_between(least=1, most=MAX_INTEGER),
    ),
    ConfigRule(
        keys=re.compile(
            r"(?:\w+_)?num_(?:\w+_)?(?:layers|blocks)|n_layers?|layers|depth|(?:encoder|decoder)_layers|(?:\w+_)?head_dim"
            r"|d_kv|(?:\w+_)?(?:ffn|intermediate)_(?:size|dim)|n_inner|d_ff|num_(?:\w+_)?experts(?:_per_tok)?|n_\w+_experts"
        ),
        meaning=f"a whole number from 0 to {MAX_INTEGER:,}",
        is_valid=_integer_from(0),
    ),
    ConfigRule(
        keys=re.compile(r"(?:\w+_)?(?:eps|epsilon)"),
        meaning="a finite number, 0 or more",
        is_valid=_number_between(least=0),
    ),
    ConfigRule(
        keys=re.compile(
            r"rope_theta|rotary_emb_base|(?:attention_|short_|long_|low_freq_|high_freq_)?factor"
            r"|original_max_position_embeddings"
        ),
        meaning="a finite number above 0",
        is_valid=_number_between(least=math.ulp(0.0)),
    ),
    ConfigRule(
        keys=re.compile(r"(?:(?:\w+_)?(?:bos|eos|pad)|decoder_start)_token_id"),
        meaning="a token id, or a list of them",
        is_valid=_integer_from(-1),  # -1: no such token
    ),
    ConfigRule(
        keys=re.compile(r"num_labels"),
        meaning=f"a whole number from 1 to {MAX_LABELS:,}",
        is_valid=lambda value: type(value) is int and 1 <= value <= MAX_LABELS,
    ),
    ConfigRule(
        keys=re.compile(r"sliding_window"),
        meaning="more than 1 token: with a window of 1 the caches of transformers keep every token",
        is_valid=lambda value: type(value) is not int or value != 1,
    ),
    ConfigRule(
        keys=re.compile(r"(?:torch_)?dtype"),
        meaning="the name of a torch dtype",
        is_valid=lambda value: isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype),
    ),
)  # fmt: skip
_LAYERS = re.compile(r"(?:\w+_)?num_(?:\w+_)?(?:layers|blocks)|n_layers?|layers|depth|(?:encoder|decoder)_layers")
_OBJECTS = re.compile(r"quantization_config|compression_config|[a-z]\w*_config|rope_parameters|rope_scaling")


def require_valid_config(values: JsonObject, file: Path, *, num_tensors: int | None = None) -> None:
    """Checks the values of config.json against `RULES`. Raises CheckpointError that names `file`, key, value and the
    valid values. `num_tensors`: tensors in the checkpoint, an upper bound for the number of layers."""
    max_layers = None if num_tensors is None else max(num_tensors, MIN_LAYER_LIMIT)
    for dotted, key, value in _entries(values, ""):
        if value is None:
            continue
        for rule in RULES:
            if rule.keys.fullmatch(key):
                for item in value if isinstance(value, list) else [value]:
                    if not isinstance(item, list | Mapping) and not rule.is_valid(item):
                        raise _invalid_value_error(file, dotted, item, rule.meaning)
        if _OBJECTS.fullmatch(key) and not isinstance(value, Mapping):
            raise _invalid_value_error(file, dotted, value, f"an object, not {type_name(value)}")
        if max_layers is not None and _LAYERS.fullmatch(key) and isinstance(value, int) and value > max_layers:
            raise _invalid_value_error(
                file, dotted, value, f"{max_layers:,} at most: the weights hold {num_tensors:,} tensors"
            )


def remove_code_keys(values: JsonObject) -> JsonObject:
    """Returns a copy without keys that name code or change what forward returns, also in nested objects. Keys of labels
    are kept only for classifiers."""
    names = values.get("architectures")
    is_classifier = isinstance(names, list) and any(str(name).endswith(_CLASSIFIER) for name in names)
    return _filter_keys(values, has_labels=is_classifier)


def _filter_keys(values: JsonObject, *, has_labels: bool) -> JsonObject:
    return {
        key: _filter_keys(value, has_labels=has_labels) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if not (_CODE.fullmatch(key) or _OUTPUTS.fullmatch(key) or (_LABELS.fullmatch(key) and not has_labels))
    }


def code_keys(values: JsonObject) -> list[str]:
    """Returns the keys that name code; nested keys are joined by dots."""
    return sorted({dotted for dotted, key, _ in _entries(values, "") if _CODE.fullmatch(key)})


def find_key(values: JsonObject, text: object) -> str | None:
    """Returns the first key with the value `text`, or None; nested keys are joined by dots."""
    return next((dotted for dotted, _, value in _entries(values, "") if isinstance(value, str) and value == text), None)


def _invalid_value_error(file: Path, dotted: str, value: JsonValue, meaning: str) -> CheckpointError:
    text = ascii(value)
    text = text if len(text) <= 60 else f"{text[:60]}..."
    return CheckpointError(f"{file}: {dotted} must be {meaning}, got {text}")


def _entries(values: JsonObject, prefix: str) -> Iterator[tuple[str, str, JsonValue]]:
    """Yields (path, key, value) of every entry, also of objects nested in objects or lists. The path is the keys joined
    by dots, after `prefix`."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        yield dotted, key, value
        for nested in value if isinstance(value, list) else [value]:
            if isinstance(nested, Mapping):
                yield from _entries(nested, f"{dotted}.")


@contextmanager
def vetted_directory(directory: Path) -> Iterator[Path]:
    """Yields a temporary safe copy of `directory` for transformers. Raises CheckpointError with file and key.

    A CheckpointError of the `with` block is raised again with the path of `directory` instead of the copy. If
    tokenizer.json is invalid JSON, the error names that file instead."""
    with TemporaryDirectory(prefix="weightstream-") as home:
        view = Path(home)
        for file in directory.iterdir():
            if file.name in VETTED:
                values = remove_code_keys(read_json_object(file, max_bytes=MAX_SETTINGS_BYTES))
                if file.name == CONFIG:
                    require_valid_config(values, file)
                (view / file.name).write_text(json.dumps(values), encoding="utf-8")
            elif file.suffix in VOCABULARIES and file.exists() and not file.is_dir():
                require_regular(file)
                (view / file.name).symlink_to(file.absolute())
            elif file.name == TEMPLATES:
                (view / file.name).symlink_to(file.absolute())
        try:
            yield view
        except CheckpointError as error:
            if (directory / TOKENIZER).exists():
                read_json_object(directory / TOKENIZER)  # transformers' error would not name the broken file
            raise CheckpointError(str(error).replace(str(view), str(directory))) from error
