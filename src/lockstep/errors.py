"""Every exception Lockstep raises on purpose.

Each says the rule, what came, and what to do. Each also inherits the builtin it
resembles, so that ordinary `except ValueError` code keeps working.

    LockstepError
    ├── PlanError (ValueError)            devices, shards and threads that do not go together
    ├── BatchError (ValueError)           data or a batch in no usable form
    ├── ModelError (ValueError)           a model, loss or metric that cannot be trained as it is
    ├── OptimizerError (ValueError)       an optimizer that does not fit, or cannot be run in parallel
    ├── StateError (ValueError)           a saved state that does not fit this model or this run
    ├── CheckpointError (ValueError)      a checkpoint that is damaged, not whole, or none at all
    ├── SaveError (OSError)               a checkpoint that could not be written
    ├── ExampleError (RuntimeError)       the script's own code failed on an example
    ├── ExactError (RuntimeError)         something that cannot keep the promise of equal bits
    │   └── DivergedError                 bits that should be equal are not
    ├── NonFiniteError (ArithmeticError)  a loss that is not a finite number
    ├── DeviceError (ValueError)          a device that is not there or does not go with the others
    ├── WorkerError (RuntimeError)        a worker process raised or died
    ├── LaunchError (RuntimeError)        launcher variables that make no sense
    ├── PlatformError (OSError)           something this operating system does not have
    ├── DatasetError (OSError)            a data set that cannot be had
    ├── MissingExtra (ImportError)        an optional package that is not installed
    ├── ArgumentError (TypeError)         an argument that a method does not take
    ├── CallbackError (TypeError)         a callback that is none, or that got what it cannot use
    └── PeerFailed (RuntimeError)         another process could not finish a step; its own error is the one raised
"""


class LockstepError(Exception):
    """The root: `except lockstep.LockstepError` catches everything Lockstep raises on purpose."""


class PlanError(LockstepError, ValueError):
    """Devices, shards and threads that do not go together."""


class BatchError(LockstepError, ValueError):
    """Data or a batch in no usable form."""


class ModelError(LockstepError, ValueError):
    """A model, loss or metric that cannot be trained as it is."""


class OptimizerError(LockstepError, ValueError):
    """An optimizer that does not fit the model, or that cannot be run in parallel."""


class StateError(LockstepError, ValueError):
    """A saved state that does not fit this model or this run."""


class CheckpointError(LockstepError, ValueError):
    """A checkpoint that is damaged, not whole, or none at all."""


class SaveError(LockstepError, OSError):
    """A checkpoint that could not be written. Training goes on from where it was, older checkpoints are whole."""


class ExampleError(LockstepError, RuntimeError):
    """The script's own code failed on an example; the message names its index."""


class ExactError(LockstepError, RuntimeError):
    """Something that cannot keep the promise of equal bits."""


class DivergedError(ExactError):
    """Bits that should be equal are not; `digests` holds those of every step and number of devices, where known."""

    def __init__(self, message: str, digests: dict[int, tuple[str, ...]] | None = None) -> None:
        super().__init__(message)
        self.digests = digests or {}


class NonFiniteError(LockstepError, ArithmeticError):
    """A loss that is not a finite number."""

    @classmethod
    def at(cls, step: int, shard: int, value: float) -> "NonFiniteError":
        """The error of the shard whose loss is `value`."""
        return cls(
            f"A loss is a finite number. Got {value} in step {step}, shard {shard}. The model is as it was before that "
            "step. Look at that shard's examples, or use a smaller learning rate or clip_norm=1.0."
        )


class DeviceError(LockstepError, ValueError):
    """A device that is not there, or that does not go with the others."""


class WorkerError(LockstepError, RuntimeError):
    """A worker process raised or died."""


class LaunchError(LockstepError, RuntimeError):
    """Launcher variables that make no sense."""


class PlatformError(LockstepError, OSError):
    """Something that this operating system does not have."""


class DatasetError(LockstepError, OSError):
    """A data set that cannot be had."""


class MissingExtra(LockstepError, ImportError):
    """An optional package that is not installed."""


class ArgumentError(LockstepError, TypeError):
    """An argument that a method does not take."""


class CallbackError(LockstepError, TypeError):
    """A callback that is none, or that got what it cannot use."""


class PeerFailed(LockstepError, RuntimeError):
    """Another process could not finish a step, so nobody commits it; its own error is the one a script sees."""
