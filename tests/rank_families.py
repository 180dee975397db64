"""Every family by ranks, in each way, beside transformers: which are exact, which refused.

    python -m tests.rank_families [way=tensor] [ranks=2] [tiers=nvme,cpu] [continuous=1] [families=llama;gpt2]
        [experts=rows,whole]

prints a row for each and the counts; the exit code is 1 where one is WRONG. KV heads of a family are as many as there
are ranks, if there are more of these. Families without experts run once.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from runtime import Runtime, RuntimeConfig
from runtime.config.settings import DevicesConfig, DividedExperts, Parallelism, Tier
from runtime.errors import ConfigError
from runtime.model.families import FAMILIES, Family
from runtime.ranks.ranks import Ranks
from runtime.sequences.sequence import Completion
from tests.rank_processes import in_ranks
from tests.runtime.test_families import config_for
from tests.runtime.uneven_pages import continuous
from tests.support import Reference

EXACT, WRONG, SAME = "exact", "WRONG", "as above"


class FamilyCase(NamedTuple):
    config: RuntimeConfig
    reference: Reference
    devices: DevicesConfig
    is_first: bool  # of the ways to divide experts


def verdict(ranks: Ranks, case: FamilyCase) -> str:
    """Says of one rank what its tokens are, or why there are none."""
    ranks.devices, reference = case.devices, case.reference
    times = ranks.size if case.devices.way is Parallelism.sharded else 1  # as many rows, and pages, for each rank
    try:
        runtime = Runtime(case.config, ranks=ranks)
        if not case.is_first and not runtime.model.shape.has_grouped_experts:
            return SAME
        results = runtime.generate([list(prompt) for prompt in reference.prompts] * times)
    except ConfigError as error:
        return f"refused: {str(error).partition(': ')[2]}"
    tokens = [list(each.token_ids) for each in results if isinstance(each, Completion)]
    return EXACT if tokens == [*reference.expected] * times else WRONG


def verdicts(ranks: Ranks, cases: Sequence[FamilyCase]) -> list[str]:
    return [verdict(ranks, each) for each in cases]


def enough_heads(family: Family, num_ranks: int) -> Family:
    num_heads = family.overrides.get("num_key_value_heads")
    if not isinstance(num_heads, int) or num_heads >= num_ranks:
        return family
    return replace(family, overrides={**family.overrides, "num_key_value_heads": num_ranks})


def main(arguments: Sequence[str]) -> int:
    options = dict(argument.split("=", 1) for argument in arguments)
    names = options["families"].split(";") if "families" in options else FAMILIES
    parallelism, num_ranks = Parallelism(options.get("way", "sharded")), int(options.get("ranks", 2))
    tiers = [Tier(name) for name in options.get("tiers", "nvme").split(",")]
    divisions = [DividedExperts(name) for name in options.get("experts", "auto").split(",")]
    is_continuous = bool(int(options.get("continuous", "0")))
    cases = dict[str, FamilyCase]()
    with tempfile.TemporaryDirectory() as home:
        for name in names:
            reference = Reference.make(enough_heads(FAMILIES[name], num_ranks), Path(home) / name)
            for tier, experts in product(tiers, divisions):
                config, devices = config_for(reference, tier), DevicesConfig(way=parallelism, experts=experts)
                config = continuous(config) if is_continuous else config
                cases[f"{name}, {tier.value}, {experts.value}"] = FamilyCase(
                    config, reference, devices, experts is divisions[0]
                )
        results = in_ranks(num_ranks, verdicts, [*cases.values()])
    merged = [each[0] if len({*each}) == 1 else WRONG for each in zip(*results, strict=True)]
    for name, each in zip(cases, merged, strict=True):
        print(f"{name:34} | {each}")
    counts = Counter(each.partition(":")[0] for each in merged)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return int(counts[WRONG] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
