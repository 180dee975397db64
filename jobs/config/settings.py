"""Typed settings of each job. The only module that uses OmegaConf: all others see dataclasses."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TypeAlias, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runtime.config.sampling import STRUCTURES
from runtime.config.settings import (
    BUILT_IN,
    Admission,
    DevicesConfig,
    DType,
    KVConfig,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    Parallelism,
    PolicyConfig,
    Pooling,
    PrefetchConfig,
    Readout,
    RuntimeConfig,
    SamplingConfig,
    require,
    require_beams_fit,
    require_groups_agree,
)
from runtime.config.texts import is_url, require_plain_url
from runtime.errors import ConfigError

from ..datasets.config import DatasetConfig
from ..datasets.fields import ShardConfig
from ..files.publishing import JsonValue, json_digest
from .typed import ARCHITECTURE, build, field_types, flatten

T = TypeVar("T")
Composed: TypeAlias = DictConfig  # Hydra's argument of a job's main

MAX_WORKERS = 1024  # per command
OPERATIONAL_GROUPS = frozenset({"offload", "kv", "prefetch", "machine", "devices"})
LOSSY_KEYS = frozenset({"kv.dtype"})  # keys of OPERATIONAL_GROUPS that change the output
# Keys of other groups that do not change greedy float32 output. Rows over max_row_bytes change the input digest; the
# manifest has window_rows and the result of model.verify=full.
OPERATIONAL_KEYS = frozenset(
    {
        "policy.schedule",
        "policy.attention",
        "policy.feedforward",
        "policy.share_prefixes",
        "policy.draft_tokens",
        "policy.draft_model",
        "dataset.max_row_bytes",
        "dataset.window_rows",
        "model.mirrors",
        "model.self_check",
        "model.verify",
    }
)


class LogLevel(Enum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class Output(Enum):
    """Files written after a run besides its parts; `auto` is OpenAI's batch files if the input is an OpenAI batch."""

    auto = "auto"
    parts = "parts"
    openai_batch = "openai_batch"


class SummaryFormat(Enum):
    """What a run prints to stdout: tables and samples, or one JSON object."""

    text = "text"
    json = "json"


class Workers(Enum):
    """Number of processes that work on a run: one, or any number that share its blocks."""

    one = "one"
    elastic = "elastic"


class Tracker(Enum):
    """Programs that show the curves of a run; each is an extra."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


class TableFormat(Enum):
    text = "text"
    markdown = "markdown"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings common to all runs: generation, scoring and encoding."""

    model: ModelConfig = field(default_factory=ModelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    run: str | None = None
    out: str | None = None
    output: Output = Output.auto
    output_root: str = "outputs"
    output_private: bool = False
    output_url: str | None = None
    upload_retry_seconds: float = 300.0
    checkpoint_seconds: float | None = 60.0
    workers: Workers = Workers.one
    num_workers: int | None = 1
    lease_seconds: float = 300.0
    log_level: LogLevel = LogLevel.info
    quiet: bool = False
    summary: SummaryFormat = SummaryFormat.text
    trace: bool = False
    track: list[Tracker] = field(default_factory=list)
    metrics_file: str | None = None
    on_end: str | None = None
    on_end_seconds: float = 60.0

    def __post_init__(self) -> None:
        _require_path(self.model)
        _require_output_root(self.output_root)
        require_groups_agree(self.policy, self.prefetch, self.offload)
        require_beams_fit(self.policy, self.sampling)
        is_batch, keeps = self.is_batch, self.dataset.keep_columns
        require(
            self.output is not Output.openai_batch or is_batch,
            f"output=openai_batch needs dataset=openai_batch, got dataset={self.dataset.kind.value}",
        )
        require(
            keeps or self.output is Output.parts or not is_batch,
            "output=openai_batch needs dataset.keep_columns=true: set it, or set output=parts",
        )
        require(
            self.dataset.window_rows is None or not self.dataset.has_turns,
            "dataset.window_rows does not support multi-turn chats: set it to null",
        )
        seconds = self.checkpoint_seconds
        require(seconds is None or seconds >= 0, f"checkpoint_seconds must be 0 or more, or null, got {seconds}")
        require(self.lease_seconds >= 2, f"lease_seconds must be 2 or more, got {self.lease_seconds}")
        require(
            self.out is None or self.shard.count == 1,
            f"out={self.out} would hold one of {self.shard.count} shards: weightstream export joins all of them",
        )
        self._require_uploadable()
        limit = self.on_end_seconds
        require(limit > 0, f"on_end_seconds must be above 0 s, got {limit:g}")
        require(self.on_end is None or bool(self.on_end.strip()), "on_end is empty: set a command, or null")
        count = self.num_workers
        is_valid = count is None or 1 <= count <= MAX_WORKERS
        require(is_valid, f"num_workers must be 1 to {MAX_WORKERS:,}, or null, got {count}")
        require(self.is_elastic or count == 1, f"num_workers={count} needs workers=elastic")
        admission = self.policy.admission
        is_supported = not self.is_elastic or admission is Admission.wave
        require(is_supported, f"workers=elastic needs policy.admission=wave, got {admission.value}")
        if self.devices.way is not Parallelism.one:
            self._require_for_ranks()
        require(
            self.run is None or re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", self.run) is not None,
            f"run must be letters, digits, '.', '_' and '-' (it names a directory below output_root), got {self.run!r}",
        )

    def _require_uploadable(self) -> None:
        url, seconds = self.output_url, self.upload_retry_seconds
        require_plain_url(url, "output_url")
        require(url is None or is_url(url), f"output_url must be a URL, e.g. s3://bucket/prefix, or null, got {url!r}")
        require(seconds >= 0, f"upload_retry_seconds must be 0 or more, got {seconds}")

    def _require_for_ranks(self) -> None:
        devices, window = f"devices={self.devices.way.value}", self.dataset.window_rows
        require(not self.is_elastic, f"{devices} does not support workers=elastic: set workers=one")
        require(window is None, f"{devices} does not support dataset.window_rows: set it to null, or set devices=one")

    @property
    def is_elastic(self) -> bool:
        return self.workers is Workers.elastic

    @property
    def is_batch(self) -> bool:
        """True if the input is an OpenAI batch."""
        return self.dataset.kind.name == Output.openai_batch.name

    @property
    def prints_tables(self) -> bool:
        """True if stdout gets tables, samples and how to read the output."""
        return not self.quiet and self.summary is SummaryFormat.text

    @property
    def has_batch_files(self) -> bool:
        """True if the run ends with OpenAI's batch files; a single shard writes none."""
        return self.is_batch and self.output is not Output.parts and self.shard.count == 1

    @property
    def runtime(self) -> RuntimeConfig:
        """The settings that `Runtime` takes."""
        return RuntimeConfig(
            model=self.model,
            offload=self.offload,
            kv=self.kv,
            prefetch=self.prefetch,
            policy=self.policy,
            sampling=self.sampling,
            machine=self.machine,
        )

    def _require_no_generation(self, job: str) -> None:
        """Raises ConfigError for settings that need generation. `job`: name of the job, for messages."""
        sampling, beams, way = self.sampling, self.sampling.num_beams, self.devices.way
        no_effect = f"has no effect in weightstream {job}: leave it out"
        require(sampling.n == 1, f"sampling.n={sampling.n} {no_effect}")
        require(beams in (None, 1), f"sampling.num_beams={beams} {no_effect}")
        structures = [key for key in STRUCTURES if getattr(sampling, key) is not None]
        require(not structures, f"sampling.{''.join(structures)} {no_effect}")
        why = f"devices={way.value} does not support weightstream {job}: set devices=sharded, tensor or one"
        require(way is not Parallelism.pipeline, why)
        turns = f"weightstream {job} does not support multi-turn chats: leave out dataset.turns_field and dataset.turns"
        require(not self.dataset.has_turns, turns)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RunSettings):
    """All settings of `jobs.generate`; mirrors conf/generate.yaml."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.sampling.n == 1 or not self.dataset.has_turns,
            f"sampling.n={self.sampling.n} does not support multi-turn chats: set dataset.repeat instead",
        )


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """Settings of scoring. `rolling`: scores the prompt itself as a document, in windows of `window_tokens`; None is
    the model's context length."""

    target_field: str = "target"  # a text, or a list of texts
    rolling: bool = False
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.target_field), "score.target_field is empty")
        window = self.window_tokens
        require(window is None or window >= 1, f"score.window_tokens must be 1 or more tokens, or null, got {window}")
        require(window is None or self.rolling, "score.window_tokens has no effect without score.rolling=true")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(RunSettings):
    """All settings of `jobs.score`; mirrors conf/score.yaml."""

    score: ScoreSettings = field(default_factory=ScoreSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_no_generation("score")
        is_windowed = self.score.rolling and self.dataset.window_rows is not None
        require(not is_windowed, "dataset.window_rows does not support score.rolling=true: set it to null")
        has_targets = self.score.rolling or self.dataset.keep_columns
        require(has_targets, "score.target_field needs dataset.keep_columns=true")

    @property
    def has_batch_files(self) -> bool:
        """Always False: OpenAI's batches have no scoring requests."""
        return False


@dataclass(frozen=True, kw_only=True)
class EncodeSettings:
    """Settings of encoding. `pooling` and `normalize` apply to embeddings, `num_top` to classes and masks."""

    output: Readout = Readout.embedding
    pooling: Pooling | None = None
    normalize: bool = False
    num_top: int = 5

    def __post_init__(self) -> None:
        is_embedding = self.output is Readout.embedding
        needs = f"needs encode.output=embedding, got {self.output.value}"
        require(self.pooling is None or is_embedding, f"encode.pooling {needs}")
        require(not self.normalize or is_embedding, f"encode.normalize {needs}")
        require(self.num_top >= 1, f"encode.num_top must be 1 or more, got {self.num_top}")


@dataclass(frozen=True, kw_only=True)
class EncodeConfig(RunSettings):
    """All settings of `jobs.encode`; mirrors conf/encode.yaml."""

    encode: EncodeSettings = field(default_factory=EncodeSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_no_generation("encode")
        require(
            not self.is_batch or self.encode.output is not Readout.masks,
            "encode.output=masks does not support dataset=openai_batch: set encode.output=embedding or classes",
        )


@dataclass(frozen=True, kw_only=True)
class SynthesizeConfig:
    """All settings of `jobs.synthesize`; mirrors conf/synthesize.yaml. Only the name of `model` is used.
    `architecture`: keys of transformers' config, from the model's file; transformers validates them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    architecture: dict[str, object] = field(default_factory=dict)
    out: str | None = None
    seed: int = 0
    dtype: DType = DType.bfloat16
    max_shard_gib: float = 4.0
    alignment_bytes: int = 8
    tokenizer: str | None = None
    output_root: str = "outputs"
    log_level: LogLevel = LogLevel.info

    def __post_init__(self) -> None:
        _require_output_root(self.output_root)
        require(bool(self.out), "out is not set: the directory to write, e.g. out=outputs/checkpoints/mine")
        require(
            self.dtype is not DType.auto, "dtype must be float32, bfloat16 or float16 for a new checkpoint, got auto"
        )
        require(self.max_shard_gib > 0, f"max_shard_gib must be above 0 GiB, got {self.max_shard_gib}")
        require(
            self.alignment_bytes >= 8 and self.alignment_bytes % 8 == 0,
            f"alignment_bytes must be a multiple of 8 bytes, required by safetensors, got {self.alignment_bytes}",
        )
        require(
            bool(self.architecture),
            f"model={self.model.name} has no architecture: choose another model, or set one with "
            "+architecture.model_type=llama",
        )
        model_type = self.architecture.get("model_type")
        require(
            isinstance(model_type, str) and bool(model_type),
            f"architecture.model_type must name a model type of transformers, e.g. llama, got {model_type!r}",
        )


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """All settings of `jobs.models`; mirrors conf/models.yaml."""

    family: str | None = None
    formats: bool = False
    format: TableFormat = TableFormat.text
    shapes: str | None = None


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """All settings of `jobs.trace`; mirrors conf/trace.yaml. The window is in seconds since the start of the run, or of
    the passes of a plan."""

    run: str | None = None
    begin: float = 0.0
    end: float | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.run), "run is not set: a run directory, or a file in <run>/trace (written by trace=true)")
        require(self.begin >= 0, f"begin must be 0 seconds or more, got {self.begin}")
        require(self.end is None or self.end > self.begin, f"end must be after begin={self.begin} s, got {self.end}")
        is_known = self.out is None or self.out.endswith((".svg", ".png"))
        require(is_known, f"out must end in .svg or .png, got {self.out}")


def load(cls: type[T], composed: Composed) -> T:
    """Converts a config composed by Hydra to an instance of `cls`, with interpolations resolved. A model's architecture
    is dropped if `cls` has no such field.

    Raises ConfigError for an unknown key (with the closest known one), a value of the wrong type, settings that exclude
    each other, and broken interpolations.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{error.full_key or 'config'} cannot be resolved: {reason}") from error
    assert isinstance(values, dict)
    if ARCHITECTURE not in field_types(cls):  # `suggest_key` rejects it on the command line
        values.pop(ARCHITECTURE, None)
    return build(cls, {str(key): value for key, value in values.items()})


def semantic(config: RunSettings) -> dict[str, JsonValue]:
    """The settings that can change the output, flat and JSON-ready; they must be equal on resume. `policy` is included:
    a row's rounding depends on the rows in its micro-batch."""
    return {key: value for key, value in flatten(config).items() if _is_semantic(key) and not _is_unset(key, value)}


def operational(config: RunSettings) -> dict[str, JsonValue]:
    """The other settings, which may change on resume: tiers, prefetch, schedule, machine, output paths, log level.
    Without `on_end`, which may contain the address or key of a service: they are written to files."""
    return {key: value for key, value in flatten(config).items() if not _is_semantic(key) and key != "on_end"}


def _is_semantic(key: str) -> bool:
    """Unknown groups count as semantic: a refused resume is better than one with other results."""
    group, _, name = key.partition(".")
    is_operational = group in OPERATIONAL_GROUPS and key not in LOSSY_KEYS
    return bool(name) and not is_operational and key not in OPERATIONAL_KEYS


def _is_unset(key: str, value: JsonValue) -> bool:
    """True for sampling settings that are off; these are left out, so that new settings do not change run names."""
    return key.startswith("sampling.") and (value is None or (key == "sampling.follow_model" and value is False))


def run_name(config: RunSettings) -> str:
    """The directory name of a run: `run`, or a hash of the semantic settings that differ from their defaults. New keys
    do not change it. A shard is a separate run: its name ends in `-00001-of-00004`."""
    defaults = semantic(type(config)())
    keys = {
        key: value
        for key, value in semantic(config).items()
        if not key.startswith("shard.") and (key not in defaults or value != defaults[key])
    }
    model = PurePath(config.model.path or "hf").name if config.model.name == "hf" else config.model.name
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", f"{model}-{config.dataset.kind.value}")[:80].lstrip(".-")
    name = config.run or f"{readable}-{json_digest(keys)[:10]}"
    return name if config.shard.count == 1 else f"{name}-{config.shard.index:05d}-of-{config.shard.count:05d}"


def run_directory(config: RunSettings) -> Path:
    jobs = {ScoreConfig: "score", EncodeConfig: "encode"}
    job = next((name for kind, name in jobs.items() if isinstance(config, kind)), "generate")
    return Path(config.output_root) / job / run_name(config)


def settings_warnings(config: RunSettings) -> list[str]:
    """Warnings about settings without effect or with a probably unintended effect. Warnings that need the model or the
    plan: see `runtime.plan.plan_warnings`."""
    return [*_ignored_settings(config), *_escape_warnings(config.sampling.stop or [])]


def _escape_warnings(stop: list[str]) -> list[str]:
    """Warnings about stop strings with a backslash and a letter: the shell does not expand "\\n" in plain quotes."""
    return [
        f"sampling.stop has {text!r}: a backslash and a letter, not a control character; in bash "
        f"write $'sampling.stop=[\"{text}\"]'"
        for text in stop
        if re.search(r"\\[nrt]", text)
    ]


def _ignored_settings(config: RunSettings) -> list[str]:
    sampling = config.sampling
    off = {"top_k": 0, "top_p": 1, "min_p": 0, "top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
    is_greedy = sampling.is_greedy and config.dataset.temperature_field is None
    ignored = [
        f"sampling.{key}={getattr(sampling, key)} has no effect: sampling.temperature=0 is greedy"
        for key in off
        if is_greedy and getattr(sampling, key) not in (None, off[key])
    ]
    ignored += [
        f"sampling.{key}={getattr(sampling, key)} has no effect: sampling.ignore_eos=true"
        for key in ("min_new_tokens", "min_length", "exponential_decay_length_penalty")
        if getattr(sampling, key) and sampling.ignore_eos
    ]
    ignored += [
        f"sampling.{key}={getattr(sampling, key)} has no effect: sampling.num_beams is not set"
        for key in ("length_penalty", "early_stopping")
        if getattr(sampling, key) is not None and sampling.num_beams in (None, 1) and not sampling.follow_model
    ]
    return ignored


def require_packages(trackers: Sequence[Tracker]) -> None:
    """Raises ConfigError unless the packages of all `trackers` are installed."""
    for tracker in trackers:
        name = tracker.value  # also of the package and of the extra
        require(find_spec(name) is not None, f"track={name} needs the extra: pip install 'weightstream[{name}]'")


def read_yaml(path: Path) -> dict[str, object]:
    """Reads a YAML file with its interpolations resolved."""
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(values, dict), f"{path} holds no mapping"
    return {str(key): value for key, value in values.items()}


def _require_path(model: ModelConfig) -> None:
    if model.name in BUILT_IN:
        require(
            model.path is None,
            f"model={model.name} is bundled and takes no model.path, got {model.path!r}: set model=hf",
        )
    else:
        require(bool(model.path), f"model.path is not set: model={model.name} needs a local directory or a hub id")


def _require_output_root(output_root: str) -> None:
    require(bool(output_root.strip()), "output_root is empty: name a directory, e.g. output_root=outputs")
