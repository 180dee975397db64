"""python -m jobs.trace: a picture of a window of a trace, a run's (trace=true) or a plan's (plan.timeline=true)."""

from pathlib import Path

import hydra

from jobs.config.cli import as_job, run_job, say
from jobs.config.settings import Composed, TraceConfig, load
from runtime.errors import ConfigError


@hydra.main(config_path="../conf", config_name="trace", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(TraceConfig, composed)

    from jobs.pictures.trace_file import read_processes
    from jobs.pictures.trace_picture import Window, draw_panels

    assert config.path is not None, "the config class has checked it"
    processes = read_processes(Path(config.path))
    last = max((span.end for spans in processes.values() for span in spans), default=0.0)
    end = last if config.end is None else config.end
    if config.begin >= min(end, last):
        raise ConfigError(f"begin={config.begin:g} s is not before the end of the window: the trace ends at {last:g} s")
    out = Path(config.out) if config.out is not None else Path(config.path).with_suffix(".svg")
    draw_panels(
        out,
        [
            (spans, Window(begin=config.begin, end=end, title=f"{config.path}: {name}"))
            for name, spans in processes.items()
        ],
    )
    say(f"{out}: {config.begin:g} s to {end:g} s of {last:g} s")


if __name__ == "__main__":
    run_job(main, TraceConfig)
