"""The manifest of a run: its settings, and facts about the model's files and the input.

A fact is named by file and key, such as `config.json rms_norm_eps`, so that an error can name the change.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow
import torch
import transformers
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime import __version__
from runtime.errors import CheckpointError, DamagedRunError
from runtime.library.api import Runtime
from runtime.model.loading import LoadedModel

from ..config.settings import RunSettings, operational, semantic
from ..files.publishing import JsonValue, canonical_json, read_json
from ..record.input_digests import InputDigests
from ..record.manifest import PATH_KEYS, WEIGHTS_DIGEST_SUFFIX, RunManifest

LOG = logging.getLogger(__name__)
LOCATION_KEYS = frozenset({"_name_or_path", "name_or_path", "is_local", "local_files_only", "backend"})
VERSION_KEYS = frozenset({"transformers_version", "dtype"})  # the compute dtype is recorded as `model.dtype`
MAX_KEYS, MAX_CHARS = 64, 400  # larger mappings and values are stored as a digest


def make_manifest(config: RunSettings, runtime: Runtime, digests: InputDigests) -> RunManifest:
    """The manifest, with resolved dtype and sampling, since `auto` may differ between machines."""
    settings, model = semantic(replace(config, sampling=runtime.config.sampling)), runtime.model
    resolved = {
        "model.dtype": str(model.compute_dtype).removeprefix("torch."),
        "weights": model.fingerprint,
        "tokenizer": tokenizer_fingerprint(model.tokenizer),
        "input": digests.prompts_digest,
    }
    checkpoint = str(model.checkpoint.path)
    folder = Path(config.model.tokenizer or checkpoint)
    template = folder / "chat_template.jinja"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "pyarrow": pyarrow.__version__}
    return RunManifest(
        semantic={key: value for key, value in settings.items() if key not in PATH_KEYS} | resolved,
        operational=operational(config) | {key: value for key, value in settings.items() if key in PATH_KEYS},
        versions={"weightstream": __version__, **versions},
        facts={**model_facts(model), **digests.facts},
        defaults=semantic(type(config)()),
        sources={
            **dict.fromkeys(("weights", "config.json", "generation_config.json", "adapter_config.json"), checkpoint),
            "tokenizer": str(folder),
            "tokenizer_config.json": str(folder),
            "chat_template": str(template if template.exists() else folder / "tokenizer_config.json"),
            "input": config.dataset.path or f"dataset={config.dataset.kind.value}",
            **dict.fromkeys(
                map(_digest_key, model.checkpoint.stored_files),
                "model.verify=sampled; set model.verify=full to record it",
            ),
            **{_digest_key(file): file for file in model.digests},
        },
    )


def _digest_key(file: str) -> str:
    return f"{Path(file).name}{WEIGHTS_DIGEST_SUFFIX}"


def model_facts(model: LoadedModel) -> dict[str, JsonValue]:
    """Facts from all files that can change the output. Weight digests only with model.verify=full. Sampling defaults of
    generation_config.json are not facts: with `sampling.follow_model` they are in the settings."""
    facts = {f"config.json {key}": value for key, value in _flatten_values(model.config, VERSION_KEYS | LOCATION_KEYS)}
    facts |= _generation_facts(model)
    facts |= _adapter_facts(model.checkpoint.path)
    facts |= {_digest_key(file): digest for file, digest in model.digests.items()}
    if model.tokenizer is not None:
        facts["chat_template"] = _value_or_digest(model.tokenizer.chat_template)
        init_kwargs = {key: value for key, value in model.tokenizer.init_kwargs.items() if not key.endswith("_file")}
        facts |= {
            f"tokenizer_config.json {key}": value
            for key, value in _flatten_values(init_kwargs, LOCATION_KEYS | {"chat_template"})
        }
    return facts


def _generation_facts(model: LoadedModel) -> dict[str, JsonValue]:
    """Token ids from generation_config.json; empty without that file, since config.json then supplies them."""
    if model.checkpoint.gguf is not None:
        return {"GGUF eos_token_id": sorted(model.eos_token_ids)}
    if not (model.checkpoint.path / "generation_config.json").exists():
        return {}
    return {
        "generation_config.json eos_token_id": sorted(model.eos_token_ids),
        "generation_config.json decoder_start_token_id": model.start_token_id,
    }


def _adapter_facts(checkpoint: Path) -> dict[str, JsonValue]:
    """Contents of adapter_config.json, with a warning: the adapter is not applied."""
    path = checkpoint / "adapter_config.json"
    try:
        values = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except DamagedRunError as error:
        raise CheckpointError(f"{path} is no JSON object") from error
    LOG.warning("%s: adapters are not applied, the base model runs; merge the adapter into the weights first", path)
    return {f"adapter_config.json {key}": value for key, value in _flatten_values(values, frozenset())}


def _flatten_values(
    values: Mapping[str, object], excluded: frozenset[str], prefix: str = ""
) -> Iterator[tuple[str, JsonValue]]:
    for key, value in values.items():
        if str(key) in excluded:
            continue
        if isinstance(value, Mapping) and 0 < len(value) <= MAX_KEYS:
            yield from _flatten_values(value, excluded, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _value_or_digest(value)


def _value_or_digest(value: object) -> JsonValue:
    plain = _to_json_value(value)
    text = canonical_json(plain)
    return plain if len(text) <= MAX_CHARS else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _to_json_value(value: object) -> JsonValue:
    """Converts to JSON values; other objects and infinities become text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else repr(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    return [_to_json_value(item) for item in value] if isinstance(value, list | tuple) else str(value)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """SHA-256 over the tokenizer backend's serialization, or the vocabulary, and the chat template."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}\0{tokenizer.chat_template}".encode("utf-8", "surrogatepass")).hexdigest()
