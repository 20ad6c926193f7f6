"""What `fit` was asked for, beside the data to train on: how far, what is validated, callbacks, checkpoint."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import Any

from lockstep.checkpoint import Checkpoint
from lockstep.core import batches
from lockstep.core.arguments import is_number, show
from lockstep.errors import ArgumentError, BatchError
from lockstep.training.call_arguments import checked_integer, checked_optional


@dataclass(frozen=True)
class Validation:
    """What `fit` validates on; `freq` is a number of epochs, or the epochs themselves, counted from 1 as Keras does.

    >>> every_second, listed = Validation(None, freq=2), Validation(None, freq=[1, 4])
    >>> [[rule.is_due(epoch) for epoch in range(4)] for rule in (every_second, listed)]
    [[False, True, False, True], [True, False, False, True]]
    """

    data: Any
    batch_size: int | None = None  # None: training's
    steps: int | None = None  # None: all batches
    freq: int | Collection[int] = 1

    def __post_init__(self) -> None:
        checked_optional("validation_batch_size", self.batch_size)
        checked_optional("validation_steps", self.steps)
        listed: Any = (
            [self.freq] if isinstance(self.freq, int | str) or not isinstance(self.freq, Collection) else self.freq
        )
        if not all(_is_epoch(each) for each in listed):
            raise ArgumentError(
                "validation_freq is how many epochs lie between two validations, or a list of the epochs to validate, "
                f"counted from 1. Got {show(self.freq)}. Use validation_freq=2, or validation_freq=[1, 5, 10]."
            )

    def is_due(self, epoch: int) -> bool:
        """Whether the epoch with this index, from 0, is validated."""
        if isinstance(self.freq, Collection):
            return epoch + 1 in self.freq
        return (epoch + 1) % self.freq == 0


def _is_epoch(value: Any) -> bool:
    return isinstance(value, Integral) and value is not True and int(value) >= 1


@dataclass(frozen=True)
class FitOptions:
    """The options of one `fit`."""

    epochs: int
    initial_epoch: int
    steps_per_epoch: int | None
    validation: Validation | None
    callbacks: Sequence[Any] | None  # Lockstep's, or Keras's as they are
    checkpoint: str | PathLike[str] | Checkpoint | None
    verbose: int

    def __post_init__(self) -> None:
        for name in ("epochs", "initial_epoch"):
            object.__setattr__(self, name, checked_integer(name, getattr(self, name), least=0))
        object.__setattr__(self, "steps_per_epoch", checked_optional("steps_per_epoch", self.steps_per_epoch))
        if self.initial_epoch and self.checkpoint is not None:
            raise ArgumentError(
                "A run with checkpoint= goes on at the epoch that its folder holds. Got initial_epoch="
                f"{self.initial_epoch} and checkpoint={str(self.checkpoint)!r}. Leave initial_epoch out."
            )


def split_validation(data: Any, fraction: float, read_arrays: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the data to train on, and the last `fraction` of it to validate on, cut before shuffling as Keras does.

    `read_arrays` gives arrays in the form in which they are cut.
    """
    if not is_number(fraction) or not 0 <= fraction < 1:
        raise ArgumentError(
            f"validation_split is the part of the data to validate on, from 0 up to 1. Got {show(fraction)}. Use "
            "validation_split=0.1, for example."
        )
    if not fraction:
        return data, None
    if not isinstance(data, dict | tuple) and not batches.is_array(data):
        raise BatchError(
            f"validation_split cuts arrays. Got a {type(data).__name__}, whose examples may come in any order. Cut it "
            "yourself, and give the two parts: fit(train, validation_data=val)."
        )
    data = read_arrays(data)
    num_examples = batches.count(data)
    kept = math.floor(num_examples * (1 - fraction))
    if not 0 < kept < num_examples:
        raise BatchError(
            f"validation_split leaves examples on both sides. Got validation_split={fraction} for {num_examples} "
            f"examples, which leaves {kept} to train on. Use validation_split={1 / max(num_examples, 2):.2g} or more."
        )
    return batches.select(data, slice(0, kept)), batches.select(data, slice(kept, num_examples))


def choose_validation(
    data: Any, held_out: Any, batch_size: int | None, steps: int | None, freq: int | Collection[int]
) -> Validation | None:
    """Return what `fit` validates on: the data given for it, or what `validation_split` has held out."""
    if data is not None and held_out is not None:
        raise ArgumentError(
            "fit validates on one piece of data. Got validation_data= and validation_split=. To validate on "
            "validation_data leave validation_split out; to validate on the last part of the data leave the other out."
        )
    chosen = Validation(held_out if data is None else data, batch_size, steps, freq)
    return None if chosen.data is None else chosen
