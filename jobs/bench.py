"""python -m jobs.bench: Millrace beside what a user could pick instead, alternating, each in a process of its own."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import hydra

from jobs.io.allocator import with_tunable
from jobs.io.bench.config import PEERS, BenchConfig
from jobs.io.cli import as_job, run_job
from jobs.io.config import Composed, load
from runtime.errors import MillraceError


@hydra.main(config_path="../conf", config_name="bench", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(BenchConfig, composed)
    logging.basicConfig(level=config.log_level.value.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)

    from dataclasses import asdict

    from jobs.io.bench.measure import Result, Task
    from jobs.io.bench.report import markdown
    from runtime.model.origin import find_checkpoint

    path = find_checkpoint(config.model, None)
    rounds: dict[str, list[Result]] = {}
    for turn in range(config.rounds):
        for contender in config.contenders:
            task = Task(
                contender=contender.value,
                path=str(path),
                num_prompts=config.num_prompts,
                prompt_tokens=config.prompt_tokens,
                num_new_tokens=config.num_new_tokens,
                ignore_eos=config.ignore_eos,
                batch_size=config.batch_size,
                micro_batch_size=config.micro_batch_size,
                num_micro_batches=config.num_micro_batches or -(-config.num_prompts // config.micro_batch_size),
                weight_share=config.weight_share,
                num_threads=config.num_threads,
            )
            worker = [sys.executable, "-m", "jobs.io.bench.measure", json.dumps(asdict(task))]
            environment = dict(os.environ) if contender in PEERS else with_tunable(dict(os.environ))
            done = subprocess.run(worker, stdout=subprocess.PIPE, text=True, check=False, env=environment)
            if done.returncode:
                raise MillraceError(f"contender {contender.value} ended with exit code {done.returncode}; see above")
            result = Result(**json.loads(done.stdout.splitlines()[-1]))
            rounds.setdefault(contender.value, []).append(result)
            print(f"round {turn + 1} {contender.value}: {result.seconds:.1f} s", file=sys.stderr, flush=True)
    command = "python -m jobs.bench " + " ".join(argument for argument in sys.argv[1:] if "path=" not in argument)
    table = markdown(rounds, command.strip())
    folder = Path(config.output_root) / "bench" / config.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(table + "\n")
    measured = {name: [{**asdict(r), "tokens": len(r.tokens)} for r in results] for name, results in rounds.items()}
    (folder / "rounds.json").write_text(json.dumps(measured, indent=1, allow_nan=False) + "\n")
    print(table)


if __name__ == "__main__":
    run_job(main, BenchConfig)
