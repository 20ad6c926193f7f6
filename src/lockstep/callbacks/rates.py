"""Learning rates, for callbacks that change them."""

from typing import Any

from lockstep.errors import CallbackError


def changeable(trainer: Any, callback: str) -> tuple[float, ...]:
    """The trainer's learning rates; raises where its optimizer shows none.

    >>> from types import SimpleNamespace
    >>> changeable(SimpleNamespace(learning_rates=(0.1,)), "ReduceLROnPlateau")
    (0.1,)
    """
    rates: tuple[float, ...] = trainer.learning_rates
    if not rates:
        raise CallbackError(
            f"{callback} changes learning rates. This optimizer has none that can be read and set. "
            "Let it keep them in its state (optax.inject_hyperparams), or use the framework's own schedule."
        )
    return rates
