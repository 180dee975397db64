"""The errors a user can meet. Each message says what was asked, the numbers with units, and the config key to
change."""

from collections.abc import Sequence


class WeightstreamError(Exception):
    """Root of the family; `exit_code` is what a job ends with when the error reaches the top."""

    exit_code = 2


class ConfigError(WeightstreamError):
    """A config value is unknown, of the wrong type, or impossible together with another."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError."""
    if not condition:
        raise ConfigError(message)


class ClosedError(WeightstreamError):
    """A runtime, or a stream of completions, was used after its end."""


class CheckpointError(WeightstreamError):
    """Weights are missing, truncated, or disagree with their index or with the model's own shapes."""


class StorageError(WeightstreamError):
    """Weights cannot be read for now: their disk or network is at fault. What is committed stays good and the run can
    resume."""

    exit_code = 75


class BudgetError(WeightstreamError):
    """A plan needs more memory than its budget; raised before the first weight is read."""


class DatasetError(WeightstreamError):
    """A data set as a whole cannot be used. A single bad row never raises: it becomes an error row."""


class RunMismatchError(WeightstreamError):
    """The run directory belongs to another run: config, weights, tokenizer or input differ."""


class RunInUseError(WeightstreamError):
    """Another process works in the run directory. Starting again at once would only find it there again."""


class OutputError(WeightstreamError):
    """The output directory cannot be written; what is committed stays good and the run can resume."""

    exit_code = 75


class KVFileError(WeightstreamError):
    """Keys and values on disk cannot be written, or are not read back as they were written. What is committed stays
    good and the run can resume."""

    exit_code = 75


class EvaluationError(WeightstreamError):
    """A harness cannot go on: a task of its own fails, or a request has no answer. What is answered stays good."""

    exit_code = 3


class DamagedRunError(WeightstreamError):
    """The run directory holds state that a person must look at."""

    exit_code = 4


class BrokenModelError(WeightstreamError):
    """The model gives NaN or infinity for whatever it is asked; what is committed stays good."""

    exit_code = 4


class Interrupted(WeightstreamError):
    """The run was asked to stop; what is committed stays good and the run can resume."""

    exit_code = 75


class PeerEnded(Interrupted):
    """Another rank of the same run has ended. `ranks`: those that have, where it is known."""

    def __init__(self, message: str, ranks: Sequence[int]):
        super().__init__(message, ranks)  # as what it is pickled by
        self.ranks = ranks

    def __str__(self) -> str:
        return str(self.args[0])


class JobEnded(WeightstreamError):
    """A job that a launcher of a sweep ran in another process ended with `exit_code`, which is not 0."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)  # as what it is pickled by on its way back
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"a job of the sweep ended with exit code {self.exit_code}; its log says more"


class MemoryShortage(WeightstreamError):
    """The machine gave no more memory although the plan fits its budget; what is committed stays good and the run can
    resume."""

    exit_code = 75


class InternalError(WeightstreamError):
    """An exception that nobody foresaw: a mistake of ours. The code is EX_SOFTWARE of sysexits.h."""

    exit_code = 70
