"""Means with 95% confidence intervals. Samples of one row are not independent: a row counts with their mean."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959964  # 97.5 % quantile of the normal distribution
NUM_RESAMPLES, SEED = 2000, 0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with the ends of its interval; all are None if there are no rows."""

    num_rows: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None


def estimate(row_values: Sequence[float]) -> Estimate:
    """The mean, with a Wilson interval if all values are 0 or 1, else a percentile bootstrap over rows with a fixed
    seed (Wilson 1927; Efron 1979)."""
    values = np.asarray(row_values, dtype=np.float64)
    if not len(values):
        return Estimate(num_rows=0)
    mean = float(values.mean())
    is_binary = bool(np.isin(values, (0.0, 1.0)).all())
    low, high = wilson_interval(mean, len(values)) if is_binary else bootstrap_interval(values)
    return Estimate(num_rows=len(values), mean=mean, low=low, high=high)


def estimate_groups(groups: Sequence[Sequence[float]]) -> Estimate:
    """The mean of all values, with a percentile bootstrap over groups: values of a group are not independent. Groups
    must not be empty. `num_rows` counts values."""
    if not groups:
        return Estimate(num_rows=0)
    sums, counts = np.array([sum(group) for group in groups]), np.array([len(group) for group in groups])
    generator = np.random.default_rng(SEED)
    indices = generator.integers(0, len(groups), (NUM_RESAMPLES, len(groups)))
    low, high = np.percentile(sums[indices].sum(axis=1) / counts[indices].sum(axis=1), (2.5, 97.5))
    num_values = int(counts.sum())
    return Estimate(num_rows=num_values, mean=float(sums.sum() / num_values), low=float(low), high=float(high))


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson interval of a proportion of `count` independent rows."""
    scale = 1 + Z * Z / count
    middle = (share + Z * Z / (2 * count)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """The 2.5th and 97.5th percentiles of the means of resamples of the same size."""
    generator = np.random.default_rng(SEED)
    means = [values[generator.integers(0, len(values), len(values))].mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
