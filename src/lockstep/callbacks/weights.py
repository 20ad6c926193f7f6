"""Weights: the model's own arrays, out of a trainer and into it. The optimizer's stay as they are."""

from collections.abc import Mapping
from typing import Any

from lockstep.backends.base import Array

MODEL = "model."


def take(trainer: Any) -> dict[str, Array]:
    """Copies of the model's arrays, parameters and running statistics alike, by name.

    >>> import lockstep
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5, momentum=0.9), "cross_entropy") as trainer:
    ...     list(take(trainer))
    ['model.0.weight', 'model.0.bias']
    """
    return {name: array for name, array in trainer.state().items() if name.startswith(MODEL)}


def put(trainer: Any, weights: Mapping[str, Array]) -> None:
    """Gives the model these arrays.

    >>> import lockstep
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy") as trainer:
    ...     before = trainer.digest()
    ...     put(trainer, take(trainer))
    ...     trainer.digest() == before
    True
    """
    trainer.load_state({**trainer.state(), **weights})
