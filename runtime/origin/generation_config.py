"""What a checkpoint says of generating, found where transformers' generate finds it: in generation_config.json or, if
there is none, in config.json."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig

from ..errors import CheckpointError
from ..store.checkpoint import is_gguf
from ..store.gguf import read_gguf
from ..store.json_object import read_json_object
from .config_rules import require_sound, without_code
from .net import one_line
from .vetted_files import CONFIG, MAX_SETTINGS_BYTES

log = logging.getLogger(__name__)

FILE = "generation_config.json"
GGUF_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")  # of a turn, of a message


@dataclass(frozen=True, kw_only=True)
class ModelGeneration:
    """`given`: what the checkpoint's `source` says, by transformers' own keys, less what it leaves open."""

    source: Path
    given: Mapping[str, object]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Each of them ends a completion; empty where the checkpoint names none."""
        eos = self.given.get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        known = frozenset(token for token in ids if isinstance(token, int))
        if len(known) != len(set(map(str, ids))):
            raise CheckpointError(f"{self.source}: eos_token_id must be a token id or a list of them, got {eos!r}")
        return known

    @property
    def start_token_id(self) -> int:
        """What a decoder behind an encoder begins with. Raises CheckpointError where the checkpoint does not say."""
        for name in ("decoder_start_token_id", "bos_token_id"):
            start = self.given.get(name)
            if isinstance(start, int):
                return start
        raise CheckpointError(f"{self.source.parent}: neither {FILE} nor {CONFIG} has a decoder_start_token_id")


def read_generation(path: Path, config: PreTrainedConfig) -> ModelGeneration:
    """What the checkpoint at `path` says of generating: a directory, or a GGUF file. Raises CheckpointError naming
    file, key, value and what is expected."""
    if is_gguf(path):
        return _of_gguf(path, config)
    file = path / FILE
    try:
        values = read_json_object(file, max_bytes=MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        return _of_config(path / CONFIG)
    require_sound(values, file)
    with one_line(str(file)):
        return _taken(file, GenerationConfig.from_dict({**without_code(values)}))


def _of_gguf(path: Path, config: PreTrainedConfig) -> ModelGeneration:
    """The settings of the config that transformers makes of the file. Beyond transformers, the ends of a turn and of a
    message that the file names are among the ends: a chat model would write the next turns itself."""
    found = _taken(path, GenerationConfig.from_model_config(config))
    metadata, ends = read_gguf(path).metadata, found.eos_token_ids
    ids = range(int(metadata.get("tokenizer.ggml.tokens", 0)))  # others are nothing that a model can say
    said = {key: int(metadata[key]) for key in GGUF_ENDS if metadata.get(key) in ids}
    more = {key: token for key, token in said.items() if token not in ends}
    if not more:
        return found
    named = " and ".join(f"{key}={token}" for key, token in more.items())
    log.info("%s: %s end a completion too, beside eos_token_id=%s", path, named, sorted(ends))
    return replace(found, given={**found.given, "eos_token_id": sorted(ends.union(more.values()))})


def _of_config(file: Path) -> ModelGeneration:
    """What config.json says of generating: as in transformers what the file says counts, not its class's defaults."""
    values = without_code(read_json_object(file, max_bytes=MAX_SETTINGS_BYTES))
    with one_line(str(file)):
        return _taken(file, GenerationConfig.from_model_config({**values}))


def _taken(source: Path, config: GenerationConfig) -> ModelGeneration:
    given = {key: value for key, value in vars(config).items() if value is not None and not key.startswith("_")}
    return ModelGeneration(source=source, given=given)
