"""What goes on beside a command with a run and after it: the feed of trackers and metrics, and the command `on_end`."""

import os
import random
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from runtime.config.settings import Parallelism
from runtime.errors import ConfigError, Interrupted, WeightstreamError, require
from runtime.ranks.launch import Launch

from ..config.process import WORKER_VARIABLE
from ..config.settings import RunSettings, require_packages
from ..record.passes import Start
from ..record.run_dir import RunDirectory
from ..record.run_reader import is_locked
from .feed import RunFeed
from .metrics_file import SUFFIX
from .on_end import run_on_end

STATUSES = {0: "finished", 3: "errors", 75: "interrupted"}  # by exit code; any other: failed
NUM_LOOKS = 3


class RunFollower:
    """Context manager around all that a command does for the run in `directory`. Set `exit_code` before the end unless
    an exception ends it. Follows nothing on ranks above 0; workers of one command have a feed each, and their parent
    runs the command."""

    def __init__(self, config: RunSettings, directory: Path, start: Start | None = None):
        """Raises ConfigError for settings that cannot be followed: a missing package, a directory that is absent."""
        require_packages(config.track)
        _require_metrics_file(config.metrics_file)
        launch = Launch.from_environment(os.environ) if config.devices.way is not Parallelism.one else None
        is_first = launch is None or not launch.rank
        self._config, self._directory = config, directory
        self._command = config.on_end if is_first and WORKER_VARIABLE not in os.environ else None
        targets = (config.track, config.metrics_file) if is_first else ((), None)
        self.feed = RunFeed(directory, *targets, start=start)
        self.exit_code = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code, message = self.exit_code, ""
        if isinstance(error, WeightstreamError):
            code, message = error.exit_code, str(error)
        elif error is not None:
            code = Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 70
            message = f"{type(error).__name__}: {error}"
        status = STATUSES.get(code, "failed")
        self.feed.close(status, code)
        if self._command is None or self._has_other_workers():
            return
        variables = {
            "WEIGHTSTREAM_EXIT_CODE": str(code),
            "WEIGHTSTREAM_STATUS": status,
            "WEIGHTSTREAM_RUN": str(self._directory.absolute()),
            "WEIGHTSTREAM_ERROR": message.replace("\0", "")[:4096],
        }
        run_on_end(self._command, variables, self._config.on_end_seconds)

    def _has_other_workers(self) -> bool:
        """True if other processes still work on the run: the last one runs the command. Looks repeatedly, since other
        workers that end hold the lock for an instant while they look."""
        if not self._config.is_elastic:
            return False
        runs = (self._directory, *self._directory.glob("turn-*"))
        for look in range(NUM_LOOKS):
            if not any(is_locked(RunDirectory(path=path).lock) for path in runs):
                return False
            if look < NUM_LOOKS - 1:
                time.sleep(random.uniform(0.05, 0.2))
        return True


def _require_metrics_file(name: str | None) -> None:
    if name is None:
        return
    path = Path(name)
    require(path.suffix == SUFFIX, f"metrics_file={name} must end in {SUFFIX}: node_exporter reads no other files")
    if not path.parent.is_dir():
        raise ConfigError(f"metrics_file={name}: there is no directory {path.parent}; make it, or choose another one")
    require(os.access(path.parent, os.W_OK | os.X_OK), f"metrics_file={name}: directory {path.parent} is not writable")
