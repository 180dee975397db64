"""All targets by name."""

from tests.fuzz import checkpoints, datasets, headers, runs
from tests.fuzz.target import Target

BY_NAME: dict[str, Target] = {
    target.name: target for target in (*headers.TARGETS, *datasets.TARGETS, *checkpoints.TARGETS, *runs.TARGETS)
}
