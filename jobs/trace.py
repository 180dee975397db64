"""python -m jobs.trace: draws a window of the trace of a run (trace=true) or plan (plan.timeline=true)."""

import os
from dataclasses import replace
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
    from jobs.pictures.trace_file import TracedProcess, find_trace_files, read_all
    from jobs.pictures.trace_picture import TimeWindow, draw_panels

    assert config.run is not None, "the config class has checked it"
    path = Path(config.run)
    files = find_trace_files(path)
    traces = read_all(files)
    last = max(next(iter(processes.values()), TracedProcess()).end for _, processes in traces)
    end = last if config.end is None else config.end
    if config.begin >= min(end, last):
        raise ConfigError(
            f"begin={config.begin:g} s must be before the end of the window; the trace ends at {last:g} s"
        )
    folder = Path(os.path.commonpath([file.parent for file in files]))
    default = folder / "all.svg" if path.is_dir() else path.with_suffix(".svg")
    out = Path(config.out) if config.out is not None else default
    require_replaceable([out], f"out={out}")
    panels = list[tuple[TracedProcess, TimeWindow]]()
    for file, processes in traces:
        window = TimeWindow(begin=config.begin, end=end, title=str(file))
        for name, process in processes.items():
            titled = replace(window, title=f"{file}: {name}")
            if process is not (measured := next(iter(processes.values()))):
                shown = titled.predicted(measured, process)
                titled = replace(shown or window, title=f"{titled.title}, on its own time axis")
                process = process if shown is not None else TracedProcess()
            panels.append((process, titled))
    draw_panels(out, panels)
    print_line(f"{out}: {config.begin:g} s to {end:g} s of {last:g} s")


if __name__ == "__main__":
    run_job(main, TraceConfig)
