"""How the next token is chosen: what `sampling.*` says for a run, and what one request may ask otherwise."""

from dataclasses import dataclass, field, replace

from .errors import require


@dataclass(frozen=True, kw_only=True)
class SamplingOverrides:
    """What one request asks otherwise than the run does; None: as the run. `stop` replaces the run's, also with []."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    stop: list[str] | None = None

    @property
    def given(self) -> dict[str, int | float | list[str]]:
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen, with transformers' own meaning of each key. `temperature: 0` is greedy."""

    n: int = 1
    max_new_tokens: int = 32
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words: list[str] = field(default_factory=list)
    seed: int = 0
    ignore_eos: bool = False
    stop: list[str] = field(default_factory=list)
    logprobs: int = 0

    def __post_init__(self) -> None:
        for key in ("max_new_tokens", "min_new_tokens"):
            require(getattr(self, key) >= 0, f"sampling.{key} must be 0 or more, got {getattr(self, key)}")
        least, most, penalty = self.min_new_tokens, self.max_new_tokens, self.repetition_penalty
        require(least <= most, f"sampling.min_new_tokens={least} is above sampling.max_new_tokens={most}")
        require(self.temperature >= 0, f"sampling.temperature must be 0 (greedy) or more, got {self.temperature}")
        for key in ("top_k", "no_repeat_ngram_size", "logprobs"):
            require(getattr(self, key) >= 0, f"sampling.{key} must be 0 (off) or more, got {getattr(self, key)}")
        require(0 < self.top_p <= 1, f"sampling.top_p must be in (0, 1], got {self.top_p}")
        require(0 <= self.min_p < 1, f"sampling.min_p must be in [0, 1), got {self.min_p}")
        require(penalty > 0, f"sampling.repetition_penalty must be above 0, got {penalty}")
        require(all(self.stop), "sampling.stop holds an empty string, which would stop every row at once")
        require(all(self.bad_words), "sampling.bad_words holds an empty string")
        require(self.n >= 1, f"sampling.n must be 1 or more samples, got {self.n}")
        require(
            self.n == 1 or not self.is_greedy,
            f"sampling.n={self.n} needs sampling.temperature above 0: greedy gives the same text {self.n} times",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def overridden(self, by: SamplingOverrides) -> "SamplingConfig":
        """Raises ConfigError when what results cannot go together."""
        given = by.given
        return replace(self, **given) if given else self
