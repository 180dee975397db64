"""python -m jobs.bench: Millrace beside what a user could pick instead, or beside its own predictions; rounds
alternate, each measurement in a process of its own."""

import json
import logging
import sys
from pathlib import Path

import hydra

from jobs.io.bench.config import BenchConfig, Suite
from jobs.io.cli import as_job, run_job
from jobs.io.config import Composed, load


@hydra.main(config_path="../conf", config_name="bench", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(BenchConfig, composed)
    logging.basicConfig(level=config.log_level.value.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)

    from jobs.io.bench.measure import Result
    from jobs.io.bench.predictions import Case, outcomes_of, predictions_table
    from jobs.io.bench.report import as_json, markdown, stated
    from jobs.io.bench.worker import measured, task_of
    from runtime.model.origin import find_checkpoint

    paths = config.checkpoints or [str(find_checkpoint(config.model, None))]
    blocks = config.blocks if config.suite is Suite.predictions else [config.num_prompts]
    rounds: dict[Case, list[Result]] = {}
    cases = [
        Case(path=path, contender=contender.value, num_sequences=block)
        for path in paths
        for contender in config.contenders
        for block in blocks
    ]
    for turn in range(config.rounds):
        for case, contender in zip(cases, (c for _ in paths for c in config.contenders for _ in blocks), strict=True):
            result = measured(task_of(config, contender, case.path, case.num_sequences))
            rounds.setdefault(case, []).append(result)
            print(f"round {turn + 1} {case}: {result.seconds:.1f} s", file=sys.stderr, flush=True)
    command = "python -m jobs.bench " + " ".join(argument for argument in sys.argv[1:] if "path=" not in argument)
    if config.suite is Suite.predictions:
        table = predictions_table([outcome for case in rounds for outcome in outcomes_of(case, rounds[case])])
    else:
        table = markdown({case.contender: results for case, results in rounds.items()})
    table = f"{table}\n\n{stated(config.rounds, command.strip())}"
    folder = Path(config.output_root) / "bench" / config.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(table + "\n")
    found = {str(case): as_json(results) for case, results in rounds.items()}
    (folder / "rounds.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    print(table)


if __name__ == "__main__":
    run_job(main, BenchConfig)
