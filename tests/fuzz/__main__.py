"""python -m tests.fuzz seconds=60 [targets=config,gguf] [seed=0] [case=17] [workers=1]: cases of each target, for
`seconds` in all; `case` runs that one alone. Ends with 1 where there is a finding."""

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.fuzz import targets
from tests.fuzz.watch import Tally, watch


def main(words: list[str]) -> int:
    options = dict(word.split("=", 1) for word in words)
    names = options["targets"].split(",") if "targets" in options else list(targets.BY_NAME)
    seed, workers = int(options.get("seed", 0)), int(options.get("workers", 1))
    case = int(options["case"]) if "case" in options else None
    seconds = float(options.get("seconds", 60)) * workers / len(names)

    def tally(name: str) -> Tally:
        if case is not None:
            return watch(name, seconds=60, seed=seed, first=case, last=case)
        return watch(name, seconds=seconds, seed=seed)

    with ThreadPoolExecutor(workers) as pool:
        tallies = []
        for each in pool.map(tally, names):
            print(each, flush=True)
            tallies.append(each)
    findings = [finding for each in tallies for finding in each.findings]
    for finding in findings:
        print(f"\n{finding}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
