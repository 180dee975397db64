"""What a job writes to the screen beside its results: its log and, where it takes long, what it is about to do."""

import logging
import os
import sys

from runtime.config.settings import Parallelism
from runtime.ranks.launch import Launch

from .settings import LogLevel, RunSettings, run_directory, settings_warnings, to_yaml

NOISY_LOGGERS = ("botocore", "aiobotocore")  # log requests to stores with what signs them


def setup_logging(level: LogLevel) -> None:
    """Every line gets its time; where nobody watches, as in a file that is read later, its date as well."""
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
    """The log of a job that is soon done: lines without their time."""
    logging.basicConfig(level=level.value.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)


def log_start(log: logging.Logger, config: RunSettings) -> None:
    """Writes to stderr from now on, first what is doubtful about the settings, which model is opened and where its
    results go. Of several ranks the first one writes; the others warn. Raises ConfigError for a device that is not
    here."""
    launch = Launch.found(os.environ) if config.devices.way is not Parallelism.one else None
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
