"""The settings of a `Runtime` as keyword arguments."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypedDict

from ..config.profiles import DataSheet, MeasuredRates
from ..config.settings import (
    Admission,
    Attention,
    Dequantize,
    DType,
    ExpertPaging,
    FeedForward,
    KVConfig,
    Lanes,
    LinksConfig,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    Order,
    PolicyConfig,
    PrefetchConfig,
    Quantize,
    RuntimeConfig,
    SamplingConfig,
    SelfCheck,
    SharePrefixes,
    Verify,
)
from ..config.texts import did_you_mean
from ..errors import require

AMBIGUOUS_KEYS = {"dtype": "model"}  # key that exists in several groups -> the group that the keyword sets


class Settings(TypedDict, total=False):
    """Keyword arguments of `Runtime`. An argument is a whole group of the config, such as `offload`, or one key of a
    group without the group's name: `host_memory_gib` for `offload.host_memory_gib`.

    Only keys that are unique among groups can be arguments, and `dtype`, which is `model.dtype`. `machine.device` is a
    separate parameter of `Runtime`. A group may be a str, as in `RuntimeConfig`. If a group and one of its keys are
    passed together, the key changes the passed group."""

    model: ModelConfig | str
    offload: OffloadConfig | str
    kv: KVConfig | str
    prefetch: PrefetchConfig | str
    policy: PolicyConfig | str
    sampling: SamplingConfig
    machine: MachineConfig
    path: str | None
    revision: str | None
    tokenizer: str | None
    dtype: DType | str
    quantize: Quantize | str | None
    lanes: Lanes | str
    self_check: SelfCheck | str
    verify: Verify | str
    mirrors: tuple[str, ...]
    compile: bool
    graphs: bool
    device_memory_gib: float | None
    host_memory_gib: float | None
    resident_layers: int | None
    direct_io: bool
    reader_threads: int
    read_chunk_mib: int
    expert_paging: ExpertPaging | str
    kept_experts: int | None
    dequantize: Dequantize | str
    gather_tables: bool | None
    cache_dir: str | None
    device_fraction: float | None
    num_slots: int
    directory: str | None
    depth: int
    block_layers: int
    micro_batch_size: int | None
    num_micro_batches: int | None
    admission: Admission | str
    schedule: Order | str | None
    attention: Attention | str | None
    feedforward: FeedForward | str | None
    prefill_chunk_tokens: int | None
    share_prefixes: SharePrefixes | str
    draft_tokens: int | None
    draft_model: str | None
    pin: str | None
    follow_model: bool
    n: int
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | str | None
    max_new_tokens: int
    min_new_tokens: int | None
    min_length: int | None
    temperature: float | None
    top_h: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    bad_words: list[str]
    bad_words_ids: list[list[int]] | None
    sequence_bias: list[list[list[int] | float]] | None
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: list[int] | int | None
    exponential_decay_length_penalty: list[float] | None
    renormalize_logits: bool | None
    seed: int
    ignore_eos: bool
    stop: list[str] | None
    logprobs: int
    json_schema: str | dict[str, object] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    reasoning: list[str] | str | None
    num_threads: int | None
    sheet: DataSheet | None
    links: LinksConfig | None
    rates: MeasuredRates | None


def apply_settings(config: RuntimeConfig | None, settings: Mapping[str, object]) -> RuntimeConfig:
    """Returns `config`, or the default config, with the settings applied. Raises ConfigError."""
    is_config = config is None or isinstance(config, RuntimeConfig)
    require(is_config, f"config must be a RuntimeConfig, got {config!r}; for a model, use model={config!r}")
    result = config or RuntimeConfig()
    groups = {field.name for field in fields(RuntimeConfig)}
    key_groups = setting_groups()
    for name in settings:
        suggestion = did_you_mean(name, [*groups, *key_groups])
        hint = suggestion or "; a setting is a group or the last part of a key"
        require(name in groups or name in key_groups, f"Runtime has no setting {name}{hint}")
    if given := {name: settings[name] for name in settings if name in groups}:
        result = replace(result, **given)
    for group in sorted({key_groups[name] for name in settings if name in key_groups}):
        own = {name: value for name, value in settings.items() if key_groups.get(name) == group}
        result = replace(result, **{group: replace(getattr(result, group), **own)})
    return result


def setting_groups() -> dict[str, str]:
    """The keys that can be set without their group's name: key -> group."""
    default = RuntimeConfig()
    keys = {group.name: [key.name for key in fields(getattr(default, group.name))] for group in fields(RuntimeConfig)}
    num_groups = Counter(name for names in keys.values() for name in names)
    unique = {name: group for group, names in keys.items() for name in names if num_groups[name] == 1}
    return {name: group for name, group in (unique | AMBIGUOUS_KEYS).items() if name != "device"}
