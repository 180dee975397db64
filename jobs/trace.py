"""python -m jobs.trace: draws a window of the trace of a run (trace=true) or plan (plan.timeline=true)."""

import os
from pathlib import Path

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.settings import Composed, TraceConfig, load
from runtime.errors import ConfigError


@hydra.main(config_path="../conf", config_name="trace", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(TraceConfig, composed)

    from jobs.files.named import require_replaceable
    from jobs.pictures.trace_file import find_trace_files, read_all
    from jobs.pictures.trace_picture import TimeWindow, draw_panels

    assert config.run is not None, "the config class has checked it"
    path = Path(config.run)
    files = find_trace_files(path)
    panels = {f"{file}: {name}": spans for file, processes in read_all(files) for name, spans in processes.items()}
    last = max((span.end for spans in panels.values() for span in spans), default=0.0)
    end = last if config.end is None else config.end
    if config.begin >= min(end, last):
        raise ConfigError(
            f"begin={config.begin:g} s must be before the end of the window; the trace ends at {last:g} s"
        )
    folder = Path(os.path.commonpath([file.parent for file in files]))
    default = folder / "all.svg" if path.is_dir() else path.with_suffix(".svg")
    out = Path(config.out) if config.out is not None else default
    require_replaceable([out], f"out={out}")
    draw_panels(out, [(spans, TimeWindow(begin=config.begin, end=end, title=title)) for title, spans in panels.items()])
    print_line(f"{out}: {config.begin:g} s to {end:g} s of {last:g} s")


if __name__ == "__main__":
    run_job(main, TraceConfig)
