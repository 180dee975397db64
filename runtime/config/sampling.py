"""Sampling settings: `sampling.*` of a run, and the settings of a single request, which override them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..errors import require

MAX_SAMPLES, MAX_NEW_TOKENS = 10_000, 100_000_000  # more new tokens than any context
MAX_BEAMS = 1_000
STRUCTURES = ("json_schema", "regex", "choice", "grammar")  # structured output; at most one of them is set
# Settings that are passed unchanged to transformers' logits processors. In YAML they are keys of
# `sampling.transformers`.
PASSTHROUGH_KEYS = (
    "min_length", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "bad_words_ids", "sequence_bias",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "renormalize_logits",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingOverrides:
    """Sampling settings of one request; None keeps the run's value. `stop` replaces the run's list, also if it is
    empty. `logprobs`: all requests get the largest number that any request has. A setting in `STRUCTURES` replaces the
    run's structured output, also another kind. `json_schema` is JSON text."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    stop: list[str] | None = None
    seed: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @property
    def given(self) -> dict[str, int | float | list[str]]:
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling settings, which mean the same as in transformers. `temperature: 0` is greedy decoding.

    None turns a setting off. With `follow_model`, `Runtime` replaces None by the value in the checkpoint's
    generation_config.json. `json_schema`: an object, JSON text, or the path of a JSON file; `Runtime` converts them to
    JSON text.
    """

    follow_model: bool = False
    n: int = 1
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    max_new_tokens: int = 32
    min_new_tokens: int | None = 0
    min_length: int | None = None
    temperature: float | None = 0.0
    top_h: float | None = None
    top_k: int | None = 0
    top_p: float | None = 1.0
    min_p: float | None = 0.0
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = 1.0
    no_repeat_ngram_size: int | None = 0
    bad_words: list[str] = field(default_factory=list)
    bad_words_ids: list[list[int]] | None = None
    sequence_bias: list[list[list[int] | float]] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: list[int] | int | None = None
    exponential_decay_length_penalty: list[float] | None = None
    renormalize_logits: bool | None = None
    seed: int = 0
    ignore_eos: bool = False
    stop: list[str] | None = field(default_factory=list)
    logprobs: int = 0
    json_schema: str | dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    reasoning: list[str] | str | None = None

    def __post_init__(self) -> None:
        min_tokens, max_tokens = self.min_new_tokens or 0, self.max_new_tokens
        for key in ("max_new_tokens", "min_new_tokens", "min_length"):
            self._require(key, f"0 to {MAX_NEW_TOKENS:,}", lambda value: 0 <= value <= MAX_NEW_TOKENS)
        require(
            min_tokens <= max_tokens,
            f"sampling.min_new_tokens={min_tokens} is above sampling.max_new_tokens={max_tokens}",
        )
        self._require("temperature", "0 (greedy) or more", lambda value: value >= 0)
        for key in ("top_k", "no_repeat_ngram_size", "logprobs"):
            self._require(key, "0 (off) or more", lambda value: value >= 0)
        for key in ("top_h", "top_p", "typical_p"):
            self._require(key, "in (0, 1]", lambda value: 0 < value <= 1)
        for key in ("min_p", "epsilon_cutoff", "eta_cutoff"):
            self._require(key, "in [0, 1)", lambda value: 0 <= value < 1)
        self._require("repetition_penalty", "above 0", lambda value: value > 0)
        require(all(self.stop or []), "sampling.stop holds an empty string, which would stop every completion at once")
        require(all(self.bad_words), "sampling.bad_words holds an empty string")
        words, decay = self.bad_words_ids, self.exponential_decay_length_penalty
        require(words is None or all(words), "sampling.bad_words_ids holds an empty list; must be lists of token ids")
        for pair in self.sequence_bias or []:
            is_pair = len(pair) == 2 and isinstance(pair[0], list) and bool(pair[0]) and isinstance(pair[1], float)
            require(is_pair, f"sampling.sequence_bias must hold pairs like [[5, 6], -2.0]: token ids, bias; got {pair}")
        require(
            decay is None or (len(decay) == 2 and decay[0] >= 0 and decay[0] == int(decay[0]) and decay[1] > 0),
            f"sampling.exponential_decay_length_penalty must be like [20, 1.05]: new tokens, factor; got {decay}",
        )
        self._require_one_structure()
        require(1 <= self.n <= MAX_SAMPLES, f"sampling.n must be 1 to {MAX_SAMPLES:,} samples, got {self.n}")
        self._require_beams()
        require(
            self.n == 1 or (self.num_beams or 1) > 1 or not self.is_greedy,
            f"sampling.n={self.n} needs sampling.temperature above 0: greedy gives the same text {self.n} times",
        )

    def _require(self, key: str, what: str, is_valid: Callable[[float], bool]) -> None:
        value = getattr(self, key)
        require(value is None or is_valid(value), f"sampling.{key} must be {what}, got {value}")

    def _require_one_structure(self) -> None:
        keys = [key for key in STRUCTURES if getattr(self, key) is not None]
        require(len(keys) < 2, f"sampling.{' and sampling.'.join(keys)} exclude each other: set one of them")
        tags = self.reasoning
        is_valid = tags is None or tags == "auto" or (isinstance(tags, list) and len(tags) == 2 and all(tags))
        require(is_valid, f"sampling.reasoning must be auto, two tags like [<think>,</think>], or null, got {tags}")
        for key in keys:
            require(bool(getattr(self, key)), f"sampling.{key} is empty: set it to null if it is not used")
        require(all(self.choice or []), "sampling.choice holds an empty string")
        require(
            not keys or not self.ignore_eos,
            f"sampling.ignore_eos=true never ends, sampling.{''.join(keys)} must end: set one of them",
        )

    def _require_beams(self) -> None:
        """Raises ConfigError for settings that beam search does not support."""
        early = self.early_stopping
        is_valid = isinstance(early, bool | None) or early == "never"
        require(is_valid, f"sampling.early_stopping must be true, false or never, got {early}")
        self._require("num_beams", f"1 (off) to {MAX_BEAMS:,}", lambda value: 1 <= value <= MAX_BEAMS)
        if not self.num_beams or self.num_beams == 1:
            return
        search = f"sampling.num_beams={self.num_beams}"
        require(
            self.n <= self.num_beams,
            f"sampling.n={self.n} is above {search}: a beam search returns {self.num_beams} completions at most",
        )
        require(
            not self.temperature,
            f"{search} is a deterministic search, sampling.temperature={self.temperature} samples: set num_beams=1 or "
            "temperature=0",
        )
        others = [key for key in (*STRUCTURES, "reasoning") if getattr(self, key) is not None]
        require(not others, f"{search} does not support sampling.{' and sampling.'.join(others)}: set num_beams=1")

    @property
    def is_greedy(self) -> bool:
        """True if decoding is greedy. False if `follow_model` is set and the model's temperature is not known yet."""
        return not self.temperature and not (self.follow_model and self.temperature is None)

    def with_overrides(self, by: SamplingOverrides) -> "SamplingConfig":
        """Returns the settings of a request: a copy with its overrides `by`. Raises ConfigError if they contradict the
        run's."""
        values = by.given
        require(
            not self.ignore_eos or by.ignore_eos in (None, True),
            "ignore_eos=false: not possible for a request if the run sets sampling.ignore_eos=true",
        )
        is_search = (self.num_beams or 1) > 1
        require(
            not is_search or self.ignore_eos or not by.ignore_eos,
            f"ignore_eos: not possible for one request with sampling.num_beams={self.num_beams}; set it for the run",
        )
        off = dict.fromkeys(STRUCTURES) if any(key in values for key in STRUCTURES) else {}
        return replace(self, **{**off, **values}) if values else self


FOLLOW_MODEL = SamplingConfig(  # sampling=model on the command line
    follow_model=True, min_new_tokens=None, temperature=None, top_k=None, top_p=None, min_p=None,
    repetition_penalty=None, no_repeat_ngram_size=None, stop=None,
)  # fmt: skip
