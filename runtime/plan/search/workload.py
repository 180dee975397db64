"""The workload of a run for the policy search: number of requests, their lengths, and shared prefixes."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...units import round_up
from ..placement.memory import PAGE_TOKENS, SequenceSize

MAX_SAMPLED_LENGTHS = 512  # maximum number of prompt lengths in a workload


@dataclass(frozen=True, order=True)
class SharedRange:
    """A range of prompt tokens that requests share: the part of a prefix after its parent, a shorter shared prefix."""

    begin: int
    end: int
    num_sharing: int  # requests that share the range
    count: int  # number of such prefixes: same range, other tokens

    def num_spared(self, lane_size: int) -> int:
        """Returns how many requests need not compute the range, if lanes (or blocks) have `lane_size` of them.

        One request of each lane computes the range for all of them.
        """
        return self.count * (self.num_sharing - -(-self.num_sharing // lane_size))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Number and lengths of the requests of a run."""

    num_requests: int
    prompt_tokens: tuple[int, ...]  # ascending prompt lengths, each for an equal number of requests
    max_new_tokens: int
    num_scored: int = 0  # scored tokens per prompt, on average; 0: requests generate
    shared: tuple[SharedRange, ...] = ()  # prefixes that requests share

    @staticmethod
    def from_sizes(sizes: Sequence[SequenceSize]) -> "Workload":
        """Makes the workload from all prompt lengths, or from evenly spaced quantiles if there are many.

        Assumes that every output is as long as the longest.
        """
        lengths = sorted(size.num_prompt_tokens for size in sizes)
        num_lengths = min(len(lengths), MAX_SAMPLED_LENGTHS)
        sharing = Counter(each for size in sizes if size.prefix is not None for each in size.prefix.chain)
        prefix_parts = Counter(  # the part of each prefix after its parent prefix
            (prefix.parent.num_tokens if prefix.parent is not None else 0, prefix.num_tokens, num_sharing)
            for prefix, num_sharing in sharing.items()
        )
        return Workload(
            num_requests=len(sizes),
            prompt_tokens=tuple(
                lengths[(2 * number + 1) * len(lengths) // (2 * num_lengths)] for number in range(num_lengths)
            ),
            max_new_tokens=max((size.max_new_tokens for size in sizes), default=0),
            num_scored=-(-sum(size.num_scored for size in sizes) // max(1, len(sizes))),
            shared=tuple(sorted(SharedRange(*span, count) for span, count in prefix_parts.items())),
        )

    @staticmethod
    def from_mean(num_requests: int, *, mean: float, longest: int, max_new_tokens: int) -> "Workload":
        """Makes a workload from the mean and the longest prompt length.

        Lengths follow the power law with this mean: quantile q has length longest * q^(longest/mean - 1). Raises
        ValueError if the mean exceeds the longest.
        """
        if not 1 <= mean <= longest:
            raise ValueError(f"prompts of {mean} tokens in the mean and {longest} at most: 1 <= mean <= longest")
        power = longest / mean - 1
        quantiles = [(number + 0.5) / MAX_SAMPLED_LENGTHS for number in range(MAX_SAMPLED_LENGTHS)]
        return Workload(
            num_requests=num_requests,
            prompt_tokens=tuple(max(1, round(longest * quantile**power)) for quantile in quantiles),
            max_new_tokens=max_new_tokens,
        )

    def pad_to_longest(self) -> "Workload":
        """Returns the workload with every prompt as long as the longest."""
        return replace(self, prompt_tokens=self.prompt_tokens[-1:])

    def sizes(self, num_requests: int | None = None) -> list[SequenceSize]:
        """Returns the sizes of `num_requests` (None: all), with prompt lengths at evenly spaced quantiles."""
        count = self.num_requests if num_requests is None else num_requests
        lengths = self.prompt_tokens
        chosen = (lengths[(2 * number + 1) * len(lengths) // (2 * count)] for number in range(count))
        return [
            SequenceSize(
                num_prompt_tokens=length,
                max_new_tokens=self.max_new_tokens,
                num_scored=min(length, self.num_scored),
            )
            for length in chosen
        ]

    @cached_property
    def mean_prompt_tokens(self) -> float:
        return sum(self.prompt_tokens) / max(1, len(self.prompt_tokens))

    def mean_padded_tokens(self, lane_size: int) -> float:
        """Returns the mean tokens per prompt, if lanes of similar prompts are padded to their longest prompt."""
        lengths = self.prompt_tokens
        num_lanes = -(-self.num_requests // lane_size)
        longest = [lengths[-(-number * len(lengths) // num_lanes) - 1] for number in range(1, num_lanes + 1)]
        return sum(longest) / max(1, num_lanes)

    def mean_spared_tokens(self, lane_size: int) -> float:
        """Returns the mean tokens per prompt that prefix sharing saves."""
        spared = sum((each.end - each.begin) * each.num_spared(lane_size) for each in self.shared)
        return spared / max(1, self.num_requests)

    def mean_spared_squares(self, lane_size: int) -> float:
        """Returns the reduction of `mean_squared_tokens` by prefix sharing."""
        spared = sum((each.end**2 - each.begin**2) * each.num_spared(lane_size) for each in self.shared)
        return spared / max(1, self.num_requests)

    @cached_property
    def mean_squared_tokens(self) -> float:
        """The mean square of prompt lengths, which is proportional to the number of query-key pairs."""
        return sum(length**2 for length in self.prompt_tokens) / max(1, len(self.prompt_tokens))

    @cached_property
    def mean_capacity_tokens(self) -> float:
        """The mean KV positions of a sequence at its token limit, in whole pages."""
        whole = [round_up(length + self.max_new_tokens, PAGE_TOKENS) for length in self.prompt_tokens]
        return sum(whole) / max(1, len(whole))

    @property
    def num_new_tokens(self) -> int:
        """The number of tokens that all requests generate or score."""
        return self.num_requests * max(self.max_new_tokens, self.num_scored)

    @cached_property
    def digest(self) -> str:
        """A digest that is equal for workloads with equal search results."""
        scored = f" {self.num_scored}" if self.num_scored else ""
        shared = f" {self.shared}" if self.shared else ""
        text = f"{self.num_requests} {self.max_new_tokens} {self.prompt_tokens}{scored}{shared}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
