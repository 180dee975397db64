"""Exceptions whose messages users see. Each message contains the wrong value, numbers with units, and the config key to
change."""

from collections.abc import Sequence


class WeightstreamError(Exception):
    """Base class of all errors below. `exit_code`: exit code of a job that ends with this error."""

    exit_code = 2


class ConfigError(WeightstreamError):
    """A config value is unknown, of the wrong type, or impossible together with another."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


class ClosedError(WeightstreamError):
    """A runtime or a stream of completions was used after it was closed."""


class CheckpointError(WeightstreamError):
    """Weights are missing, truncated, or do not match their index or the shapes of the model."""


class StorageError(WeightstreamError):
    """Weights cannot be read because their disk or network failed. Committed results are kept; the run can resume."""

    exit_code = 75


class BudgetError(WeightstreamError):
    """A plan needs more memory than its budget. Raised before any weight is read."""


class DatasetError(WeightstreamError):
    """A whole data set is unusable. A single unusable row does not raise this; it gets an output row with the error."""


class RunMismatchError(WeightstreamError):
    """The run directory belongs to another run: config, weights, tokenizer or input differ."""


class RunInUseError(WeightstreamError):
    """Another process works in the run directory. Restarting immediately would fail again."""


class OutputError(WeightstreamError):
    """The output directory cannot be written. Committed results are kept; the run can resume."""

    exit_code = 75


class KVFileError(WeightstreamError):
    """The KV cache file cannot be written, or reads back different data. The run can resume."""

    exit_code = 75


class EvaluationError(WeightstreamError):
    """An evaluation task failed, or a request has no answer. Existing answers are kept."""

    exit_code = 3


class DamagedRunError(WeightstreamError):
    """The run directory is in a state that needs manual inspection."""

    exit_code = 4


class BrokenModelError(WeightstreamError):
    """The model returns NaN or infinity for every input. Committed results are kept."""

    exit_code = 4


class Interrupted(WeightstreamError):
    """The run was asked to stop. Committed results are kept; the run can resume."""

    exit_code = 75


class PeerEnded(Interrupted):
    """Another rank of the same run has ended. `ranks` are the ended ranks, if known."""

    def __init__(self, message: str, ranks: Sequence[int]):
        super().__init__(message, ranks)  # unpickling calls the class with these arguments
        self.ranks = ranks

    def __str__(self) -> str:
        return str(self.args[0])


class JobEnded(WeightstreamError):
    """A job that a sweep launcher ran in another process ended with the nonzero `exit_code`."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)  # unpickling calls the class with this argument
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"a job of the sweep ended with exit code {self.exit_code}; see its log"


class MemoryShortage(WeightstreamError):
    """The machine ran out of memory although the plan fits its budget. The run can resume."""

    exit_code = 75


class InternalError(WeightstreamError):
    """An unexpected exception: a bug in Weightstream. The exit code is EX_SOFTWARE of sysexits.h."""

    exit_code = 70
