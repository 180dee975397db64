"""All targets by name."""

from tests.fuzz import checkpoints, datasets, headers, runs, weights
from tests.fuzz.target import Target

BY_NAME: dict[str, Target] = {
    target.name: target for target in (*headers.TARGETS, *datasets.TARGETS, *checkpoints.TARGETS, *weights.TARGETS, *runs.TARGETS)
}
