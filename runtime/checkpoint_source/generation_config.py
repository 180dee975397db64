"""Reads a checkpoint's generation defaults (generation_config.json, else config.json) as transformers' `generate` does.

With `sampling=model` (`sampling.follow_model`) these defaults apply. Otherwise they are ignored, with a warning."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig

from ..config.sampling import SamplingConfig
from ..config.settings import RuntimeConfig
from ..errors import CheckpointError, ConfigError
from ..store.checkpoint import is_gguf
from ..store.gguf import read_gguf
from ..store.json_object import read_json_object
from .config_rules import CONFIG, MAX_SETTINGS_BYTES, remove_code_keys, require_valid_config
from .download import as_checkpoint_error

log = logging.getLogger(__name__)

FILE = "generation_config.json"
GGUF_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")  # end of turn, end of message
SAMPLING_KEYS = ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
SEARCH_KEYS = ("num_beams", "length_penalty", "early_stopping")
UNSUPPORTED_KEYS: Mapping[str, tuple[object, ...]] = {  # key -> values without effect, which are accepted
    "num_beam_groups": (1,), "diversity_penalty": (0,), "constraints": (), "force_words_ids": (),
    "penalty_alpha": (0,), "dola_layers": (), "guidance_scale": (1,), "watermarking_config": (),
    "token_healing": (False,), "encoder_repetition_penalty": (1,), "encoder_no_repeat_ngram_size": (0,),
    "remove_invalid_values": (False,), "max_time": (), "num_return_sequences": (1,), "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (), "use_mtp": (False,), "is_assistant": (False,),
}  # fmt: skip
DISABLED_VALUES: Mapping[str, object] = {  # key -> the value that turns the setting off
    "num_beams": 1, "length_penalty": 1.0, "early_stopping": False,
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0,
    "renormalize_logits": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Generation settings of the file `source`: transformers' key -> value, without null values."""

    source: Path
    values: Mapping[str, object]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a completion; empty if the checkpoint names none."""
        eos = self.values.get("eos_token_id")
        listed = eos if isinstance(eos, list) else [eos]
        ids = [] if eos is None else listed
        valid = frozenset(token for token in ids if isinstance(token, int))
        if len(valid) != len(set(map(str, ids))):
            raise CheckpointError(f"{self.source}: eos_token_id must be a token id or a list of them, got {eos!r}")
        return valid

    @property
    def start_token_id(self) -> int:
        """The first token of a decoder after an encoder. Raises CheckpointError if the checkpoint has none."""
        for name in ("decoder_start_token_id", "bos_token_id"):
            start = self.values.get(name)
            if isinstance(start, int):
                return start
        raise CheckpointError(f"{self.source.parent}: neither {FILE} nor {CONFIG} has a decoder_start_token_id")


def read_generation(path: Path, config: PreTrainedConfig) -> GenerationDefaults:
    """Reads the defaults of the checkpoint `path`, a directory or GGUF file. Raises CheckpointError with the invalid
    key and value. `config` is used only for GGUF files."""
    if is_gguf(path):
        return _read_gguf_generation(path, config)
    file = path / FILE
    try:
        values = read_json_object(file, max_bytes=MAX_SETTINGS_BYTES)
    except FileNotFoundError:  # as in transformers: the keys in config.json, without defaults of the config class
        values = remove_code_keys(read_json_object(path / CONFIG, max_bytes=MAX_SETTINGS_BYTES))
        with as_checkpoint_error(str(path / CONFIG)):
            return _make_defaults(path / CONFIG, GenerationConfig.from_model_config({**values}))
    require_valid_config(values, file)
    with as_checkpoint_error(str(file)):
        return _make_defaults(file, GenerationConfig.from_dict({**remove_code_keys(values)}))


def _read_gguf_generation(path: Path, config: PreTrainedConfig) -> GenerationDefaults:
    """Makes the defaults from transformers' `config`, and adds the file's end-of-turn and end-of-message tokens to the
    EOS tokens: without them a chat model would also generate the next turns of the chat."""
    defaults = _make_defaults(path, GenerationConfig.from_model_config(config))
    metadata, eos_ids = read_gguf(path).metadata, defaults.eos_token_ids
    vocabulary = range(int(metadata.get("tokenizer.ggml.tokens", 0)))  # the reader stores an array's length
    gguf_ends = {key: int(metadata[key]) for key in GGUF_ENDS if metadata.get(key) in vocabulary}
    added = {key: token for key, token in gguf_ends.items() if token not in eos_ids}
    if not added:
        return defaults
    names = " and ".join(f"{key}={token}" for key, token in added.items())
    log.info("%s: %s also end a completion, in addition to eos_token_id=%s", path, names, sorted(eos_ids))
    return replace(defaults, values={**defaults.values, "eos_token_id": sorted(eos_ids.union(added.values()))})


def _make_defaults(source: Path, config: GenerationConfig) -> GenerationDefaults:
    values = {key: value for key, value in vars(config).items() if value is not None and not key.startswith("_")}
    return GenerationDefaults(source=source, values=values)


@dataclass(frozen=True, kw_only=True)
class ResolvedSampling:
    """Sampling settings for one model. `sentence`: a log line that lists which of the model's defaults are used or
    ignored; None if there is nothing to report."""

    sampling: SamplingConfig
    sentence: str | None
    is_warning: bool = False


def resolve_generation_defaults(config: RuntimeConfig, model: GenerationDefaults, vocab_size: int) -> RuntimeConfig:
    """Returns the config with the sampling settings of `resolve_sampling`. Logs which defaults of the model are used or
    ignored."""
    resolved = resolve_sampling(config.sampling, model, vocab_size)
    if resolved.sentence is not None:
        log.log(logging.WARNING if resolved.is_warning else logging.INFO, "%s", resolved.sentence)
    return replace(config, sampling=resolved.sampling)


def resolve_sampling(sampling: SamplingConfig, model: GenerationDefaults, vocab_size: int) -> ResolvedSampling:
    """Combines the run's sampling settings with the model's defaults. With `sampling.follow_model`, raises ConfigError
    if the model uses an unsupported setting, and CheckpointError if a value has a wrong type."""
    model_values = _model_settings(model, vocab_size, is_strict=sampling.follow_model)
    unsupported = [
        f"{key}={value}"
        for key, without_effect in UNSUPPORTED_KEYS.items()
        if (value := model.values.get(key)) is not None and value not in without_effect
    ]
    if model.values.get("cache_implementation") == "quantized":
        unsupported.append("cache_implementation=quantized")
    if not sampling.follow_model:
        return _without_model_defaults(sampling, model, model_values, unsupported)
    if unsupported:
        raise ConfigError(
            f"sampling=model: {model.source} sets {', '.join(unsupported)}, which is not supported: use "
            "sampling=greedy or sampling=sample, which log what they ignore"
        )
    return _with_model_defaults(sampling, model, model_values)


def _with_model_defaults(
    sampling: SamplingConfig, model: GenerationDefaults, model_values: Mapping[str, object]
) -> ResolvedSampling:
    """Fills settings that the run leaves unset, as `generate` does: with the model's, else the defaults of
    `generate`. `model_values`: see `_model_settings`."""
    defaults = GenerationConfig._get_default_generation_params()
    values = {key: model_values.get(key, defaults.get(key)) for key in CONVERTERS if getattr(sampling, key) is None}
    if "temperature" in values and not model.values.get("do_sample"):
        values["temperature"] = 0.0
    elif values.get("temperature") == 0:
        raise ConfigError(f"sampling=model: {model.source} sets both do_sample=True and temperature=0")
    if sampling.min_new_tokens is not None or values.get("min_new_tokens") is not None:
        values.pop("min_length", None)  # `generate` ignores the model's min_length then
    if "stop" in values:
        values["stop"] = values["stop"] or []
    try:
        merged = replace(sampling, **values)  # pyright: ignore[reportArgumentType] - converted to the fields' types
    except ConfigError as error:
        raise ConfigError(f"sampling=model, with the settings of {model.source}: {error}") from error
    unused = {*(SAMPLING_KEYS if merged.is_greedy else ()), *(SEARCH_KEYS if (merged.num_beams or 1) <= 1 else ())}
    used = [f"{key}={values[key]}" for key in values if _is_enabled(key, values[key]) and key not in unused]
    return ResolvedSampling(
        sampling=merged, sentence=f"sampling=model: {', '.join(used) or 'greedy'}; from {model.source} and its defaults"
    )


def _without_model_defaults(
    sampling: SamplingConfig, model: GenerationDefaults, model_values: Mapping[str, object], unsupported: list[str]
) -> ResolvedSampling:
    """Returns `sampling` unchanged, with a warning that lists the model's differing settings. `unsupported`:
    `key=value` texts."""
    is_sampled = bool(model.values.get("do_sample"))
    ignored = ["do_sample=True"] if is_sampled and sampling.is_greedy else []
    is_search = _is_enabled("num_beams", model_values.get("num_beams"))
    for key, value in model_values.items():
        has_effect = _is_enabled(key, value) and (is_sampled or key not in SAMPLING_KEYS)
        has_effect = has_effect and (is_search or key not in SEARCH_KEYS)
        if has_effect and value != getattr(sampling, key):
            ignored.append(f"{key}={value}")
    if not ignored and not unsupported:
        return ResolvedSampling(sampling=sampling, sentence=None)
    advice = "sampling=model applies it"
    if unsupported:
        advice = f"sampling=model does not support it either ({', '.join(unsupported)})"
    sentence = f"{model.source} sets {', '.join([*ignored, *unsupported])}: ignored; {advice}"
    return ResolvedSampling(sampling=sampling, sentence=sentence, is_warning=True)


def _model_settings(model: GenerationDefaults, vocab_size: int, *, is_strict: bool) -> dict[str, object]:
    """Returns the model's settings: field of `SamplingConfig` -> value. Suppressed token ids outside the vocabulary are
    removed. A value of a wrong type raises CheckpointError if `is_strict`; otherwise it is returned as in the file."""
    settings: dict[str, object] = {}
    for key, convert in CONVERTERS.items():
        model_key = "stop_strings" if key == "stop" else key
        if model_key not in model.values:
            continue
        value = model.values[model_key]
        try:
            settings[key] = convert(value)
        except (TypeError, ValueError, IndexError) as error:
            if is_strict:
                raise CheckpointError(f"{model.source}: invalid {model_key}={value!r}: {error}") from error
            settings[key] = value
    for key in settings.keys() & {"suppress_tokens", "begin_suppress_tokens"}:
        settings[key] = [token for token in _list(settings[key]) if isinstance(token, int) and 0 <= token < vocab_size]
    return settings


def _is_enabled(key: str, value: object) -> bool:
    return value not in (None, [], DISABLED_VALUES.get(key))


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("expected a number")
    return float(value)


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise TypeError("expected a whole number")
    return int(value)


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("expected true or false")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        raise TypeError("expected a list")
    return list(value)


def _ids(value: object) -> list[int]:
    return [_int(token) for token in _list(value)]


def _strings(value: object) -> list[str]:
    strings = [value] if isinstance(value, str) else _list(value)
    if not all(isinstance(string, str) for string in strings):
        raise TypeError("expected a string or a list of strings")
    return [str(string) for string in strings]


def _early_stopping(value: object) -> bool | str:
    if not isinstance(value, bool) and value != "never":
        raise TypeError("expected true, false or never")
    return value if isinstance(value, bool) else "never"


# Fields of `SamplingConfig` that a model may set -> conversion of a JSON value to the field's type.
CONVERTERS: Mapping[str, Callable[[object], object]] = {
    "num_beams": _int, "length_penalty": _float, "early_stopping": _early_stopping,
    "temperature": _float, "top_h": _float, "top_k": _int, "top_p": _float, "min_p": _float, "typical_p": _float,
    "epsilon_cutoff": _float, "eta_cutoff": _float, "repetition_penalty": _float, "no_repeat_ngram_size": _int,
    "min_length": _int, "min_new_tokens": _int,
    "bad_words_ids": lambda value: [_ids(word) for word in _list(value)],
    "sequence_bias": lambda value: [[_ids(pair[0]), _float(pair[1])] for pair in map(_list, _list(value))],
    "suppress_tokens": _ids, "begin_suppress_tokens": _ids, "forced_bos_token_id": _int,
    "forced_eos_token_id": lambda value: _ids(value) if isinstance(value, list) else _int(value),
    "exponential_decay_length_penalty": lambda value: [_float(number) for number in _list(value)],
    "renormalize_logits": _bool, "stop": _strings,
}  # fmt: skip
