"""Keywords: what the `fit` of other libraries takes and ours does not, and the numbers that ours takes."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from lockstep.errors import ArgumentError, BatchError

_ONE = {"fit": "fit((x, y), ...)", "evaluate": "evaluate((x, y))"}
_INSTEAD = {
    "y": "Put inputs and targets into one: (x, y).",
    "sample_weight": "Put the weights beside the targets: (x, y, weights).",
    "validation_split": "Cut the data yourself: fit((x[:-n], y[:-n]), validation_data=(x[-n:], y[-n:])).",
    "validation_steps": "Give validation_data of the length you want, such as data.take(n).",
    "validation_batch_size": "Leave it out: validation has the batches of training.",
    "validation_freq": "Leave it out: validation follows every epoch.",
    "initial_epoch": "A run goes on from its own folder: checkpoint='run/'; epochs is then the total.",
    "steps": "Give data of the length you want, such as data.take(n).",
    "return_dict": "Leave it out: the answer is a dict.",
    "verbose": "Leave it out: nothing is printed.",
    "callbacks": "Leave them out: callbacks go with fit.",
    "workers": "Read ahead with lockstep.data: .prefetch(n).",
    "use_multiprocessing": "Read ahead with lockstep.data: .prefetch(n).",
    "max_queue_size": "Read ahead with lockstep.data: .prefetch(n).",
}


def check(method: str, extra: Sequence[Any], others: Mapping[str, Any]) -> None:
    """Refuses more data arguments than one, and keywords that the method does not have.

    >>> check("fit", (), {"validation_split": 0.1})
    Traceback (most recent call last):
    ...
    lockstep.errors.ArgumentError: fit has no validation_split. Cut the data yourself: fit((x[:-n], y[:-n]), \
validation_data=(x[-n:], y[-n:])).
    """
    if extra:
        raise BatchError(f"{method} takes one data argument. Got {1 + len(extra)}. Use {_ONE[method]}.")
    for name in others:
        raise ArgumentError(f"{method} has no {name}. {_INSTEAD.get(name, f'help(trainer.{method}) lists its words.')}")


def checked_integer(name: str, value: Any, least: int = 1) -> int:
    """Return the number as an int; raise if it is no integer or below `least`. A numpy integer is one, a bool is not.

    >>> checked_integer("epochs", 3)
    3
    >>> checked_integer("epochs", 2.5)
    Traceback (most recent call last):
    ...
    lockstep.errors.ArgumentError: epochs is an integer from 1 on. Got epochs=2.5. Use epochs=2, for example.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if whole and value >= least:
        return int(value)
    near = int(value) if isinstance(value, float) and least <= value < 2**31 else max(least, 1)
    kind = BatchError if whole else ArgumentError
    raise kind(f"{name} is an integer from {least} on. Got {name}={value!r}. Use {name}={near}, for example.")


def checked_optional(name: str, value: Any) -> int | None:
    """Return the number as `checked_integer` does, and None as it is."""
    return None if value is None else checked_integer(name, value)
