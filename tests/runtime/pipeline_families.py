"""Ranks that divide every family: python -m tests.runtime.pipeline_families [ranks=4] [families=llama;gpt2]
[continuous=1].

Tokens of all ranks are those of transformers, in memory and from disk.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runtime.config import Tier
from runtime.model.families import FAMILIES
from tests.rank_processes import in_ranks
from tests.runtime.test_families import config_for
from tests.runtime.test_pipeline import generated
from tests.runtime.uneven_pages import continuous
from tests.support import Reference

TIERS = (Tier.cpu, Tier.nvme)
UNDIVIDED = {"t5", "flan-t5", "umt5", "longcat-flash"}  # behind an encoder, and with two layers


def main(words: Sequence[str]) -> None:
    given = dict(word.split("=") for word in words)
    size = int(given.get("ranks", "4"))
    divided = ";".join(name for name in FAMILIES if name not in UNDIVIDED)
    names, is_continuous = given.get("families", divided).split(";"), bool(int(given.get("continuous", "0")))
    with tempfile.TemporaryDirectory() as home:
        for name in names:
            ref = Reference.shared(FAMILIES[name], Path(home) / name)
            configs = [config_for(ref, tier) for tier in TIERS]
            configs = [continuous(config) for config in configs] if is_continuous else configs
            for found in in_ranks(size, generated, [(config, ref.prompts) for config in configs]):
                assert found == [ref.expected] * len(TIERS), name
            print(name, flush=True)
    print(f"{len(names)} families, each in {size} ranks, in memory and from disk: the tokens of transformers")


if __name__ == "__main__":
    main(sys.argv[1:])
