"""The validated options of `fit`: epochs, validation, callbacks and checkpoint."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import Any

from lockstep.checkpoint import Checkpoint
from lockstep.core import batches
from lockstep.core.arguments import check_path, is_number, show
from lockstep.errors import ArgumentError, BatchError
from lockstep.training.call_arguments import check_integer, check_optional_integer


@dataclass(frozen=True)
class Validation:
    """The validation data of a `fit`, and the epochs after which it is evaluated.

    `freq=2` means every second epoch, and `freq=[1, 4]` means the first and the fourth epoch.

    >>> every_second, listed = Validation(None, freq=2), Validation(None, freq=[1, 4])
    >>> [[rule.is_due(epoch) for epoch in range(4)] for rule in (every_second, listed)]
    [[False, True, False, True], [True, False, False, True]]
    """

    data: Any
    batch_size: int | None = None  # None for the batch size of training
    steps: int | None = None  # None for all batches
    freq: int | Collection[int] = 1

    def __post_init__(self) -> None:
        check_optional_integer("validation_batch_size", self.batch_size)
        check_optional_integer("validation_steps", self.steps)
        listed: Any = (
            [self.freq] if isinstance(self.freq, int | str) or not isinstance(self.freq, Collection) else self.freq
        )
        if not all(_is_epoch(each) for each in listed):
            raise ArgumentError(
                "validation_freq must be the number of epochs from one validation to the next, or a list of the "
                f"epochs to validate, counted from 1. Got {show(self.freq)}. Use validation_freq=2, or "
                "validation_freq=[1, 5, 10]."
            )

    def is_due(self, epoch: int) -> bool:
        """Returns whether `fit` validates after the epoch with this index, counted from 0."""
        if isinstance(self.freq, Collection):
            return epoch + 1 in self.freq
        return (epoch + 1) % self.freq == 0


def _is_epoch(value: Any) -> bool:
    return isinstance(value, Integral) and value is not True and int(value) >= 1


@dataclass(frozen=True)
class FitOptions:
    """The options of one `fit`. The constructor raises ArgumentError if they are not valid."""

    epochs: int
    initial_epoch: int
    steps_per_epoch: int | None
    validation: Validation | None
    callbacks: Sequence[Any] | None  # callbacks of Lockstep or of Keras
    checkpoint: str | PathLike[str] | Checkpoint | None
    verbose: int
    report: str | PathLike[str] | None = None
    trace: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name, value, example in (("report", self.report, "run.html"), ("trace", self.trace, "run.json")):
            if value is not None:
                check_path(name, value, ArgumentError, example)
        for name in ("epochs", "initial_epoch"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least=0))
        object.__setattr__(self, "steps_per_epoch", check_optional_integer("steps_per_epoch", self.steps_per_epoch))
        if self.initial_epoch and self.checkpoint is not None:
            raise ArgumentError(
                f"initial_epoch={self.initial_epoch} cannot be used together with checkpoint={str(self.checkpoint)!r}, "
                "because a resumed run continues at the epoch in its checkpoint. Leave initial_epoch out."
            )


def split_validation(data: Any, fraction: float, read_arrays: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Splits the data before shuffling, as Keras does: returns the training data and the validation data.

    The validation data is the last `fraction` of the examples; None if `fraction` is 0. `read_arrays` converts the data
    to arrays that can be split.
    """
    if not is_number(fraction) or not 0 <= fraction < 1:
        raise ArgumentError(
            "validation_split, the fraction of the data to validate on, must be 0 or more and below 1. Got "
            f"{show(fraction)}. Use for example validation_split=0.1."
        )
    if not fraction:
        return data, None
    if not isinstance(data, dict | tuple) and not batches.is_array(data):
        raise BatchError(
            f"validation_split={fraction} cannot be used with a {type(data).__name__}, only with arrays. Split the "
            "data yourself, and give the two parts: fit(train, validation_data=val)."
        )
    data = read_arrays(data)
    num_examples = batches.count(data)
    kept = math.floor(num_examples * (1 - fraction))
    if not 0 < kept < num_examples:
        way_out = f"{1 / num_examples:.2g} or more" if kept else "a smaller fraction, or give more examples"
        raise BatchError(
            f"validation_split={fraction} of {num_examples} examples leaves {kept} examples to train on and "
            f"{num_examples - kept} to validate on. Use a validation_split of {way_out}."
        )
    return batches.select(data, slice(0, kept)), batches.select(data, slice(kept, num_examples))


def choose_validation(
    data: Any, held_out: Any, batch_size: int | None, steps: int | None, freq: int | Collection[int]
) -> Validation | None:
    """Returns the validation of a `fit`; None if it has none.

    `data` is the argument `validation_data`, and `held_out` the part of the data that `validation_split` has split off.
    """
    if data is not None and held_out is not None:
        raise ArgumentError(
            "validation_data= and validation_split= cannot be used together. Leave validation_split out to validate "
            "on validation_data, or leave validation_data out to validate on the last part of the data."
        )
    chosen = Validation(held_out if data is None else data, batch_size, steps, freq)
    return None if chosen.data is None else chosen
