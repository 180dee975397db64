"""python -m jobs.pack: compresses a model's weights, to three quarters without loss or rounded; verified."""

import hydra
from tqdm import tqdm

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.settings import Composed, LogLevel, load
from jobs.packing.config import PackConfig


@hydra.main(config_path="../conf", config_name="pack", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(PackConfig, composed)
    setup_plain_logging(LogLevel.info)

    from jobs.packing.packing import pack

    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:

        def progress(done_bytes: int, total_bytes: int) -> None:
            bar.total = total_bytes
            bar.update(done_bytes - bar.n)

        packing = pack(config, progress)
    for line in packing.lines:
        print_line(line)


if __name__ == "__main__":
    run_job(main, PackConfig)
