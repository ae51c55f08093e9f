"""Every error that this package raises on purpose, with the exit code that it ends a run with.

Codes 1 to 127 are permanent for the job platforms we run on; 128 and above may be retried. All errors are
built from plain positional arguments, so they survive pickling between actors and the driver.
"""

from __future__ import annotations

from typing import ClassVar


class RaytrainError(Exception):
    """Root of the tree. `exit_code` is what the command ends with when this error reaches it."""

    exit_code: ClassVar[int] = 1


class ConfigError(RaytrainError):
    """The configuration cannot be run. `problems` holds every mistake found, one line each.

    Raised by `config.load` (a value cannot be read) and `config.rules` (values contradict each other).
    """

    exit_code = 2

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class HardwareError(RaytrainError):
    """A node lacks something that the run asks for (devices, memory, a capability)."""

    exit_code = 2


class DataError(RaytrainError):
    """Training data cannot be read: names the file and, where known, the row."""

    exit_code = 2


class DataUnavailableError(DataError):
    """A filesystem, or the process that reads from it, does not answer: the data itself may be as it should be."""

    exit_code = 138


class DataChangedError(DataError):
    """The data is not what the checkpoint was trained on, so that its samples are others."""

    exit_code = 3


class CheckpointError(RaytrainError):
    """One checkpoint cannot be written or read: names its folder and the file."""

    exit_code = 3

    @classmethod
    def after_failures(cls, last: str, failed: int, most: float) -> CheckpointError:
        """`failed` saves in a row, the `last` of them for that reason, are more than the `most` that may."""
        return cls(f"{last}; {failed} saves in a row failed, more than max_failed_saves {most}")


class NoSafeStateError(RaytrainError):
    """There are checkpoints, but none is complete: starting at step 0 would overwrite them."""

    exit_code = 3


class RepeatedFaultError(RaytrainError):
    """The same fault came back at the same step."""

    exit_code = 4


class NonFiniteError(RaytrainError):
    """Loss or gradient norm stayed NaN or infinite for `max_nonfinite_steps` steps."""

    exit_code = 4


class CorruptionError(RaytrainError):
    """Data-parallel replicas hold different weights; `rank` is the one that differs from the others."""

    exit_code = 138

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class RankError(RaytrainError):
    """What ended a rank, in plain words that need neither torch nor the class that was raised.

    `kind` is a `messages.FailureKind`. `code` is the exit code of an error of this tree that a rank
    raised, or None where any other error did. `culprit` is the rank at fault, where it is not the one that raised.
    """

    def __init__(self, kind: str, message: str, code: int | None, culprit: int | None, at: float) -> None:
        super().__init__(kind, message, code, culprit, at)
        self.kind, self.code, self.culprit, self.at = kind, code, culprit, at

    def __str__(self) -> str:
        return str(self.args[1])


class RestartBudgetError(RaytrainError):
    """Every restart that the budget allows has been used."""

    exit_code = 138


class ClusterFormationError(RaytrainError):
    """The Ray cluster, or the place for every rank in it, was not there in time."""

    exit_code = 139


class StoppedBySignal(RaytrainError):
    """Someone asked the run to stop; it has saved, or said why it could not."""

    exit_code = 143
