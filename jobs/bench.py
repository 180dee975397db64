"""python -m jobs.bench: Weightstream beside its peers, its own predictions or other policies; rounds alternate, each
measurement in a process of its own. It needs a checkout of the source: `benchmarks` are not installed."""

import os
import sys
from pathlib import Path

import hydra

from jobs.config.cli import REFUSED, as_job, print_error, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.settings import Composed, load

CHECKOUT = Path(__file__).parents[1]
if not (CHECKOUT / "benchmarks").is_dir() or not (CHECKOUT / "pyproject.toml").is_file():
    print_error("benchmarks are not installed with the package: python -m jobs.bench works in a checkout of the source")
    sys.exit(REFUSED)
sys.path.insert(0, str(CHECKOUT))  # wherever the command was given, for this process and those that it measures
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))

from benchmarks.config import BenchConfig, Suite  # noqa: E402

NAMES_FILES = ("path=", "questions=", "tokenizer=")  # where something lies is nobody's business


@hydra.main(config_path="../conf", config_name="bench", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(BenchConfig, composed)
    setup_plain_logging(config.log_level)

    import pyarrow as pa
    import pyarrow.parquet as pq

    from benchmarks.report import commit, draw_rates, format_provenance, format_restriction, hardware, round_rows
    from benchmarks.suites import run_suite
    from runtime.checkpoint_source.location import find_checkpoint

    paths = config.checkpoints or [str(find_checkpoint(config.model, None))]
    machine = hardware()  # before instructions are restricted: torch looks at them once
    done = run_suite(config, paths, lambda line: print(line, file=sys.stderr, flush=True))
    shown = [argument for argument in sys.argv[1:] if not any(key in argument for key in NAMES_FILES)]
    command = "python -m jobs.bench " + " ".join(shown)
    table = f"{done.table}\n\n{format_provenance(config.rounds, command.strip())}"
    if config.isa is not None:
        taking_part = config.larger.peers if config.suite is Suite.larger_than_memory else config.contenders
        table = f"{format_restriction(machine, config.isa, taking_part)}\n\n{table}"
    folder = Path(config.output_root) / "bench" / config.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(table + "\n")
    pq.write_table(pa.Table.from_pylist(round_rows(done.rounds)), folder / "rounds.parquet")
    rates = {name: [result.rate for result in results] for name, results in done.rounds.items() if results[0].tokens}
    if rates:
        draw_rates(folder / "rates.png", rates, done.peers, f"{machine}, commit {commit()}", "generated tokens/s")
    if done.draw is not None:
        done.draw(folder)
    print_line(table)
    if done.is_interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    run_job(main, BenchConfig)
