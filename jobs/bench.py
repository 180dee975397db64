"""python -m jobs.bench: benchmarks Weightstream against other programs, its own predictions or other policies. Rounds
alternate; each measurement runs in its own process. Needs a source checkout: `benchmarks` are not installed."""

import os
import sys
from pathlib import Path

import hydra

from jobs.config.cli import REFUSED, as_job, print_error, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.settings import Composed, load

CHECKOUT = Path(__file__).parents[1]
if not (CHECKOUT / "benchmarks").is_dir() or not (CHECKOUT / "pyproject.toml").is_file():
    print_error("benchmarks are not part of the package: run python -m jobs.bench in a source checkout")
    sys.exit(REFUSED)
sys.path.insert(0, str(CHECKOUT))  # from any directory, for this process and its children
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))

from benchmarks.config import BenchConfig, Suite  # noqa: E402

NAMES_FILES = ("path=", "questions=", "tokenizer=")  # local paths are not published


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
    machine = hardware()  # before restricting instructions: torch reads them once
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
