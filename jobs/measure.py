"""python -m jobs.measure: measures the speed of this machine, for plans with machine=auto or as a machine option."""

import logging
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.process import restart_tuned
from jobs.config.settings import Composed, load
from jobs.measuring.config import MeasureJobConfig
from runtime.errors import OutputError

log = logging.getLogger(__name__)


@hydra.main(config_path="../conf", config_name="measure", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(MeasureJobConfig, composed)
    setup_plain_logging(config.log_level)

    from jobs.files.named import publish_named, require_replaceable
    from jobs.files.publishing import make_directory, write_all
    from jobs.measuring.measurement import measure_machine, progress_bar
    from jobs.measuring.report import find_suspicious_rates, format_agreement, format_table
    from runtime.measure.machine_cache import find_latest_rates, save_rates

    if config.measure.out is not None:
        require_replaceable([Path(config.measure.out)], f"measure.out={config.measure.out}")
    measurements = []
    for _ in range(config.measure.times):
        with progress_bar() as advance:
            measurements.append(measure_machine(config.machine, config.measure, advance))
    last = measurements[-1]
    print_line(format_table([measurement.figures for measurement in measurements]))
    if len(measurements) > 1:
        print_line(format_agreement([measurement.figures for measurement in measurements]))
    for note in last.notes:
        print_line(f"note: {note}")
    for warning in find_suspicious_rates(last.rates, find_latest_rates(last.host.kind), last.host):
        log.warning("%s", warning)
    try:
        save_rates(last.host, last.rates, last.products)
    except OSError as error:
        raise OutputError(f"{last.host.path}: cannot be written: {error.strerror}; set XDG_CACHE_HOME") from error
    print_line(f"{last.seconds:.0f} s; saved for machine=auto: {last.host.path}")
    if config.measure.out is not None:
        out = Path(config.measure.out)
        text = last.to_yaml(
            out.stem,
            command=f"python -m jobs.measure {' '.join(sys.argv[1:])}".strip(),
            date=datetime.now(UTC).date().isoformat(),
            versions={package: version(package) for package in ("torch", "transformers", "numba")},
            device_choice=config.machine.device,
        )
        make_directory(out.absolute().parent)
        publish_named(out, lambda file: write_all(file, text.encode()))
        print_line(str(out))


if __name__ == "__main__":
    restart_tuned()
    run_job(main, MeasureJobConfig)
