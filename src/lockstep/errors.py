"""Every exception that Lockstep raises on purpose.

A message says what is wrong with the call, with its values, and what to write instead. Each exception also inherits
from a similar builtin exception, so that code such as `except ValueError` works.

    LockstepError
    ├── PlanError (ValueError)            devices, shards and threads that do not fit together
    ├── BatchError (ValueError)           data or a batch of an unusable structure
    ├── ModelError (ValueError)           a model, loss or metric that is not supported
    ├── OptimizerError (ValueError)       an optimizer that does not fit the model, or is not supported
    ├── StateError (ValueError)           a saved state that does not fit this model or this run
    ├── CheckpointError (ValueError)      a checkpoint that is damaged, incomplete or missing
    ├── SaveError (OSError)               a checkpoint that could not be written
    ├── ExampleError (RuntimeError)       the data set or a function given to .map failed
    ├── ExactError (RuntimeError)         something for which results cannot be bit-identical
    │   └── DivergedError                 bits differ that must be equal
    ├── NonFiniteError (ArithmeticError)  a loss that is NaN or infinite
    ├── DeviceError (ValueError)          a device that is missing or does not fit the others
    ├── WorkerError (RuntimeError)        a worker process raised or died
    ├── BusyError (RuntimeError)          a call of a trainer while another one is running
    ├── LaunchError (RuntimeError)        launcher variables that are missing or inconsistent
    ├── PlatformError (OSError)           a feature that this operating system lacks
    ├── DatasetError (OSError)            a data set that cannot be downloaded or read
    ├── MissingExtra (ImportError)        an optional package that is not installed
    ├── ArgumentError (TypeError)         an unknown or missing argument of a method
    ├── CallbackError (TypeError)         an invalid callback or callback argument
    ├── PeerFailed (RuntimeError)         another process failed, so this one stops too
    └── AttemptAborted (RuntimeError)     a process was lost before a step counted; the step is made again
"""


class LockstepError(Exception):
    """The base class: `except lockstep.LockstepError` catches every exception that Lockstep raises on purpose."""


class PlanError(LockstepError, ValueError):
    """Devices, shards and threads that do not fit together."""


class BatchError(LockstepError, ValueError):
    """Data or a batch of an unusable structure."""


class ModelError(LockstepError, ValueError):
    """A model, loss or metric that is not supported."""


class OptimizerError(LockstepError, ValueError):
    """An optimizer that does not fit the model, or is not supported."""


class StateError(LockstepError, ValueError):
    """A saved state that does not fit this model or this run."""


class CheckpointError(LockstepError, ValueError):
    """A checkpoint that is damaged, incomplete or missing."""


class SaveError(LockstepError, OSError):
    """A checkpoint that could not be written. Training can continue, and older checkpoints are unchanged."""


class ExampleError(LockstepError, RuntimeError):
    """The data set or a function given to .map failed on an example, whose index is in the message."""


class ExactError(LockstepError, RuntimeError):
    """Something for which results cannot be guaranteed to be bit-identical."""


class DivergedError(ExactError):
    """Bits differ that must be equal.

    `digests` has the digests of every step by number of devices if `trainer.verify` has raised this; else it is empty.
    """

    def __init__(self, message: str, digests: dict[int, tuple[str, ...]] | None = None) -> None:
        super().__init__(message)
        self.digests = digests or {}


class NonFiniteError(LockstepError, ArithmeticError):
    """A loss that is NaN or infinite."""

    @classmethod
    def at(cls, step: int, shard: int, value: float) -> "NonFiniteError":
        """Returns the error for a shard whose loss is `value`, which is NaN or infinite."""
        return cls(
            f"The loss is {value} in step {step}, shard {shard}. The model is as it was before that "
            "step. Check the examples of this shard, or use a smaller learning rate or clip_norm=1.0."
        )


class DeviceError(LockstepError, ValueError):
    """A device that is missing, or that does not fit the others."""


class WorkerError(LockstepError, RuntimeError):
    """A worker process raised or died."""


class BusyError(LockstepError, RuntimeError):
    """A call of a trainer while another of its calls is running."""


class LaunchError(LockstepError, RuntimeError):
    """Launcher variables that are missing or inconsistent."""


class PlatformError(LockstepError, OSError):
    """A feature that this operating system lacks."""


class DatasetError(LockstepError, OSError):
    """A data set that cannot be downloaded or read."""


class MissingExtra(LockstepError, ImportError):
    """An optional package that is not installed."""


class ArgumentError(LockstepError, TypeError):
    """An unknown or missing argument of a method."""


class CallbackError(LockstepError, TypeError):
    """An invalid callback, or an invalid argument of a callback."""


class PeerFailed(LockstepError, RuntimeError):
    """Another process failed, so this process stops too.

    This is raised in processes that were launched together; the output of the failed process contains its error. If a
    worker fails that Lockstep has started, the worker's own error is raised in the script instead.
    """


class AttemptAborted(LockstepError, RuntimeError):
    """A process was lost before the step, or the evaluation of a batch, was complete.

    No state has changed. The remaining processes compute the step or the batch again, so a script does not see this
    error.
    """
