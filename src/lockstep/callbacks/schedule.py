"""Learning rate schedules: a function of the epoch or step, or a framework's scheduler.

A function is called before a step or an epoch and returns the rate for it; a scheduler is stepped after a step or an
epoch. That is how Keras and PyTorch do it.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.core.arguments import show
from lockstep.core.plain_values import restore_types, to_plain
from lockstep.errors import CallbackError


class Schedule(Protocol):
    """What both kinds of schedule do around a step or an epoch."""

    def start(self) -> None:
        """Called before the first step or epoch of a `fit`."""

    def set_rates(self, trainer: Any, index: int) -> None:
        """Called before the step or epoch `index`."""

    def advance(self) -> None:
        """Called after a step or epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, in plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load such a state."""


class LearningRateSchedule(Callback):
    """Sets the learning rates before every epoch, or before every step with `per="step"`.

    A function gets the index of the epoch in this `fit`, or of the step in the whole run, from 0; one that requires two
    arguments also gets the present rate. It returns the rate of the first group of parameters; the other groups keep
    their ratio to it. A scheduler, any object with `step()` and `state_dict()` such as PyTorch's, is stepped after
    every epoch or step, and its state is part of a checkpoint.

    >>> import lockstep, numpy as np
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> x, y = np.eye(8), np.arange(8) % 2
    >>> halved = LearningRateSchedule(lambda epoch: 0.5 * 0.5**epoch)
    >>> with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy") as trainer:
    ...     history = trainer.fit((x, y), epochs=3, callbacks=[halved], verbose=0)
    ...     trainer.learning_rates
    (0.125,)
    """

    def __init__(self, schedule: Any, per: str = "epoch") -> None:
        if not isinstance(per, str) or per not in ("epoch", "step"):
            raise CallbackError(f"per must be 'epoch' or 'step'. Got per={show(per)}. Use for example per='step'.")
        self.per = per
        self._schedule: Schedule = (
            SchedulerSchedule(schedule) if hasattr(schedule, "step") else FunctionSchedule(schedule, per)
        )

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._schedule.start()

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        if self.per == "epoch":
            self._schedule.set_rates(self.trainer, epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        if self.per == "epoch":
            self._schedule.advance()

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self.per == "step":
            self._schedule.set_rates(self.trainer, self.trainer.num_steps)

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self.per == "step":
            self._schedule.advance()

    def state_dict(self) -> dict[str, Any]:
        return self._schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._schedule.load_state_dict(state)


class FunctionSchedule:
    """A function of the index, or of the index and the present rate."""

    def __init__(self, function: Callable[..., Any], per: str) -> None:
        self._function = function
        self._per = per
        self._takes_rate = _takes_rate(function)
        self._ratios: tuple[float, ...] = ()
        self.start()

    def start(self) -> None:
        self._last: int | None = None

    def set_rates(self, trainer: Any, index: int) -> None:
        # A run resumed in the middle of an epoch begins that epoch again; its rate is set already.
        if index == self._last:
            return
        rates = read_learning_rates(trainer, "LearningRateSchedule")
        # After a rate of 0 the ratios cannot be computed again, so those from before are used.
        if len(self._ratios) != len(rates) or (self._last is None and rates[0] > 0):
            self._ratios = _compute_ratios(rates)
        value = self._function(index, rates[0]) if self._takes_rate else self._function(index)
        rate = self._check_rate(value, index)
        trainer.learning_rates = tuple(rate * ratio for ratio in self._ratios)
        self._last = index

    def advance(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "ratios": self._ratios}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._ratios = state["last"], tuple(state["ratios"])

    def _check_rate(self, rate: Any, index: int) -> float:
        try:
            number = float(rate)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise CallbackError(
                f"The schedule returned {rate!r} for {self._per} {index}. "
                "Return a learning rate: a finite number, 0 or more."
            )
        return number


class SchedulerSchedule:
    """A framework's own scheduler, which sets the optimizer's rates itself."""

    def __init__(self, scheduler: Any) -> None:
        if not callable(getattr(scheduler, "state_dict", None)):
            raise CallbackError(
                f"A scheduler needs step() and state_dict(), and this {type(scheduler).__name__} has no state_dict. "
                "Give it one, or use a function of the step."
            )
        if _count_arguments(scheduler.step)[0]:
            raise CallbackError(
                f"LearningRateSchedule calls step() without a metric, and {type(scheduler).__name__}.step needs one. "
                "Use lockstep.ReduceLROnPlateau."
            )
        self._scheduler = scheduler

    def start(self) -> None:
        pass

    def set_rates(self, trainer: Any, index: int) -> None:
        pass

    def advance(self) -> None:
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": to_plain(self._scheduler.state_dict(), "scheduler")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(restore_types(self._scheduler.state_dict(), state["scheduler"]))


def read_learning_rates(trainer: Any, callback: str) -> tuple[float, ...]:
    """Return the trainer's learning rates; raise if its optimizer has none that can be changed.

    >>> from types import SimpleNamespace
    >>> read_learning_rates(SimpleNamespace(learning_rates=(0.1,)), "ReduceLROnPlateau")
    (0.1,)
    """
    rates: tuple[float, ...] = trainer.learning_rates
    if not rates:
        raise CallbackError(
            f"{callback} cannot change the learning rate of this optimizer, which does not keep it in its state. "
            "Use optax.inject_hyperparams, or the framework's own schedule."
        )
    return rates


def _takes_rate(function: Any) -> bool:
    """Whether a function needs the present rate beside the index."""
    if not callable(function):
        raise CallbackError(
            f"A schedule must be a function of the epoch or step, or a scheduler with step(). Got {function!r}. "
            "Use for example LearningRateSchedule(lambda epoch: 0.1 * 0.9**epoch)."
        )
    required, most = _count_arguments(function)
    if required > 2 or not most:
        raise CallbackError(
            "A schedule must be a function of the index, or of the index and the present rate. "
            f"Got one of {required} arguments. Use for example lambda epoch: 0.1 * 0.9**epoch."
        )
    return required == 2


def _count_arguments(function: Any) -> tuple[int, int]:
    """How many positional arguments a function needs, and how many it can take (no limit counts as one more)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return 1, 1
    named = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    required = sum(item.default is item.empty for item in named)
    return required, len(named) + any(item.kind is item.VAR_POSITIONAL for item in parameters)


def _compute_ratios(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Each group's rate as a multiple of the first group's."""
    if rates[0] == 0 and any(rates):
        raise CallbackError(
            "The schedule's rate is the first group's, and the others keep their ratio to it, but the first "
            f"rate is 0. Got {rates}. Begin with a rate above 0 in the first group."
        )
    return tuple(rate / rates[0] if rate != rates[0] else 1.0 for rate in rates)
