"""All targets by name."""

from tests.fuzz import checkpoints, datasets, grammars, headers, runs, weights
from tests.fuzz.target import Target

MODULES = (headers, datasets, checkpoints, weights, grammars, runs)
BY_NAME: dict[str, Target] = {target.name: target for module in MODULES for target in module.TARGETS}
