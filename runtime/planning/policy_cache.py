"""Caches the policies that searches chose, one JSON file each, in the user's cache directory.

A policy is the block and micro-batch sizes, placement of weights and KV, and order of steps of a run. It is found by a
digest of the search's inputs, or by its own digest, if `policy.pin` is set. If a cached policy no longer fits the
memory or cannot be read, a new search is made.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..batching.balance import Block
from ..cache_root import cache_root
from ..config.settings import RuntimeConfig
from ..errors import BudgetError, ConfigError
from ..plan.placement.memory import SequenceSize
from ..plan.placement.placement import Budgets
from ..plan.planner import RunPlan, find_policy, plan_policy
from ..plan.search.candidate import Problem
from ..plan.search.hrm import SearchResult
from ..plan.search.policy import Policy
from ..plan.search.workload import Workload
from ..plan.shape.model import ModelShape

log = logging.getLogger(__name__)

NUM_LOGGED = 3  # sentences of `CachedPolicy.why` that are logged: the policy, the second best, and the bottleneck
SEARCH_VERSION = 4  # increment it when searches choose differently, to invalidate cached policies


@dataclass(frozen=True, kw_only=True)
class CachedPolicy:
    """A policy. `why`: sentences that explain why the search chose it."""

    policy: Policy
    why: tuple[str, ...]

    @staticmethod
    def from_plan(choice: SearchResult) -> "CachedPolicy":
        return CachedPolicy(policy=choice.best.policy, why=choice.why)

    def to_json(self) -> str:
        return json.dumps({"policy": self.policy.to_plain(), "why": self.why}, indent=1)

    @staticmethod
    def from_json(text: str) -> "CachedPolicy":
        """Raises KeyError, TypeError or ValueError for invalid `text`."""
        values = json.loads(text)
        return CachedPolicy(policy=Policy.from_plain(values["policy"]), why=tuple(map(str, values["why"])))


def search_key(
    machine: str, shape: ModelShape, config: RuntimeConfig, budgets: Budgets, sizes: Sequence[SequenceSize]
) -> str:
    """Returns a digest of the inputs of a search: machine, model, workload, budgets rounded to two digits, and
    settings. Without measured rates, which differ from one measurement to the next."""
    parts = [
        f"edition {SEARCH_VERSION}",
        machine,
        f"{shape.name} {shape.weight_bytes} {len(shape.stages)} {shape.compute_dtype_bytes} {shape.is_packed}",
        Workload.from_sizes(sizes).digest,
        f"{budgets.host_bytes:.2g} {budgets.device_bytes or 0:.2g}",
        f"{config.offload} {config.kv} {config.prefetch}",
        str(replace(config.policy, pin=None)),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def policies_directory(cache_dir: str | None) -> Path:
    """Returns the directory of cached policies: in `cache_dir`, or in the user's cache directory if that is None."""
    return cache_root(cache_dir) / "policies"


def plan_with_cached_policy(
    directory: Path,
    key: str | None,
    problem: Problem,
    *,
    blocks: tuple[Block, ...] | None = None,
    num_halvings: int = 0,
    previous: Policy | None = None,
) -> RunPlan:
    """Returns a plan with the first of these policies that is given: the one that `policy.pin` names, `previous` (the
    policy of the run so far), or the one cached under `key`. If there is none, or it does not fit, searches for a new
    policy and caches it under `key`, unless `key` is None. Logs the policy and the reasons for it.

    `blocks` and `num_halvings`: as for `find_policy`. Raises ConfigError if no policy or several match `policy.pin`,
    and BudgetError if the pinned policy does not fit.
    """
    pin = problem.config.policy.pin
    path = directory / f"{key}.json" if key is not None else None
    if pin is not None:
        policies = [cached for file in sorted(directory.glob("*.json")) if (cached := _read_policy(file)) is not None]
        matches = {cached.policy: cached for cached in policies if cached.policy.digest.startswith(pin)}
        if len(matches) != 1:
            digests = sorted({cached.policy.digest for cached in policies})
            raise ConfigError(
                f"policy.pin={pin} matches {len(matches) or 'none'} of {len(digests)} cached policies in {directory}: "
                + (", ".join(digests) or "run once without policy.pin")
            )
        cached, origin = next(iter(matches.values())), "pinned"
    elif previous is not None:
        cached, origin = CachedPolicy(policy=previous, why=(f"policy {previous.digest}: {previous}",)), "as before"
    else:
        cached, origin = _read_policy(path) if path is not None else None, "from an earlier search"
    if cached is not None:
        policy = cached.policy.halve(num_halvings)
        try:
            plan = replace(
                plan_policy(problem.with_policy(policy), blocks=blocks, num_halvings=num_halvings),
                searched_policy=policy,
            )
        except BudgetError as error:
            if pin is not None:
                raise
            log.warning("policy %s no longer fits; searching again: %s", cached.policy.digest, error)
        else:
            _log_policy(cached, origin)
            return plan
    plan = find_policy(problem, blocks=blocks, num_halvings=num_halvings)
    if plan.choice is not None:
        cached = CachedPolicy.from_plan(plan.choice)
        if path is not None:
            try:  # the cache is optional: failures are not fatal
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(
                    "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
                ) as file:
                    file.write(cached.to_json())
                os.replace(file.name, path)  # noqa: PTH105 - atomic: readers never see a partial file
            except OSError as error:
                log.warning("could not cache the policy in %s: %s", path, error)
        _log_policy(cached, "searched")
    return plan


def _log_policy(cached: CachedPolicy, origin: str) -> None:
    for sentence in cached.why[:NUM_LOGGED]:
        log.debug("policy (%s): %s", origin, sentence)


def _read_policy(path: Path) -> CachedPolicy | None:
    """Returns the policy in a file. Returns None if there is no such file, or with a warning if it is invalid."""
    try:
        return CachedPolicy.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("ignoring invalid policy file %s: %s", path, error)
        return None
