"""Logging setup, and the first log lines of a run."""

import logging
import os
import sys

from runtime.config.settings import Parallelism
from runtime.ranks.launch import Launch

from .settings import LogLevel, RunSettings, run_directory, settings_warnings, to_yaml

NOISY_LOGGERS = ("botocore", "aiobotocore")  # they log the signatures of object store requests


def setup_logging(level: LogLevel) -> None:
    """Logs to stderr with the time of each line, and also the date if stderr is not a terminal."""
    logging.basicConfig(
        level=level.value.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S" if sys.stderr.isatty() else None,
        stream=sys.stderr,
        force=True,
    )
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def setup_plain_logging(level: LogLevel) -> None:
    """Logs to stderr without times, for short jobs."""
    logging.basicConfig(level=level.value.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)


def log_start(log: logging.Logger, config: RunSettings) -> None:
    """Sets up logging; logs warnings about the settings, the model and the output directory. With several ranks, only
    rank 0 logs below warnings. Raises ConfigError if the device is missing."""
    launch = Launch.from_environment(os.environ) if config.devices.way is not Parallelism.one else None
    if launch is not None and launch.rank:
        setup_logging(LogLevel.warning)
        return
    setup_logging(config.log_level)
    if config.machine.device not in ("auto", "cpu") and config.num_workers == 1:
        from runtime.stream.device import choose_device  # torch

        choose_device(config.machine.device)
    for sentence in settings_warnings(config):
        log.warning("%s", sentence)
    log.debug("config:\n%s", to_yaml(config))
    log.info("opening %s; results go to %s", config.model.path or f"model={config.model.name}", run_directory(config))
