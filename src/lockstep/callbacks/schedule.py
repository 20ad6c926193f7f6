"""The schedule: learning rates that follow a plan, a function's or a framework's scheduler's.

A function is asked before a step or an epoch for the rate to use in it; a scheduler is
told after a step or an epoch that one has passed. That is how Keras and PyTorch do it.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.callbacks.rates import changeable
from lockstep.core.plain_values import restore_types, to_plain
from lockstep.errors import CallbackError


class Plan(Protocol):
    """What either kind does around a step or an epoch."""

    def begin(self) -> None:
        """Called before the first."""

    def before(self, trainer: Any, index: int) -> None:
        """Called before the step or epoch `index`."""

    def after(self) -> None:
        """Called after it."""

    def state_dict(self) -> dict[str, Any]:
        """The plan's state, in plain types."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over such a state."""


class LearningRateSchedule(Callback):
    """Sets the learning rates before every epoch, or before every step with `per="step"`.

    A function gets the index of the epoch in this `fit`, or of the step in the whole run, from 0;
    one of two arguments gets the present rate too. It gives the rate of the first group of parameters; the
    other groups keep their ratio to it as at the beginning. A scheduler, anything with `step()` and `state_dict()` such
    as PyTorch's, is stepped after every epoch or step, and its state is part of a checkpoint.

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
            raise CallbackError(f"A schedule moves per 'epoch' or per 'step'. Got per={per!r}. Use one of these.")
        self.per = per
        self._plan: Plan = Stepped(schedule) if hasattr(schedule, "step") else Asked(schedule, per)

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._plan.begin()

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        if self.per == "epoch":
            self._plan.before(self.trainer, epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        if self.per == "epoch":
            self._plan.after()

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self.per == "step":
            self._plan.before(self.trainer, self.trainer.num_steps)

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self.per == "step":
            self._plan.after()

    def state_dict(self) -> dict[str, Any]:
        return self._plan.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._plan.load_state_dict(state)


class Asked:
    """A function of the index, or of the index and the present rate."""

    def __init__(self, function: Callable[..., Any], per: str) -> None:
        self._function = function
        self._per = per
        self._takes_rate = _takes_rate(function)
        self._ratios: tuple[float, ...] = ()
        self.begin()

    def begin(self) -> None:
        self._last: int | None = None

    def before(self, trainer: Any, index: int) -> None:
        # A run resumed in the middle of an epoch begins that epoch again; its rate is set already.
        if index == self._last:
            return
        rates = changeable(trainer, "LearningRateSchedule")
        # Rates that ended at 0 have no ratio; the one that they had is known.
        if len(self._ratios) != len(rates) or (self._last is None and rates[0] > 0):
            self._ratios = _ratios(rates)
        given = self._function(index, rates[0]) if self._takes_rate else self._function(index)
        rate = self._checked(given, index)
        trainer.learning_rates = tuple(rate * ratio for ratio in self._ratios)
        self._last = index

    def after(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "ratios": self._ratios}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._ratios = state["last"], tuple(state["ratios"])

    def _checked(self, rate: Any, index: int) -> float:
        try:
            number = float(rate)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise CallbackError(
                f"A schedule gives a learning rate, 0 or more. Got {rate!r} for {self._per} {index}. "
                "Return a number from the function."
            )
        return number


class Stepped:
    """A framework's own scheduler, which turns the optimizer's rates itself."""

    def __init__(self, scheduler: Any) -> None:
        if not callable(getattr(scheduler, "state_dict", None)):
            raise CallbackError(
                f"A scheduler has step() and state_dict(). Got a {type(scheduler).__name__} without state_dict. "
                "Give it one, or use a function of the step."
            )
        if _num_arguments(scheduler.step)[0]:
            raise CallbackError(
                f"A scheduler's step() needs no metric. Got a {type(scheduler).__name__}, whose step does. "
                "Use lockstep.ReduceLROnPlateau."
            )
        self._scheduler = scheduler

    def begin(self) -> None:
        pass

    def before(self, trainer: Any, index: int) -> None:
        pass

    def after(self) -> None:
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": to_plain(self._scheduler.state_dict(), "scheduler")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(restore_types(self._scheduler.state_dict(), state["scheduler"]))


def _takes_rate(function: Any) -> bool:
    """Whether a function insists on the present rate beside the index."""
    if not callable(function):
        raise CallbackError(
            f"A schedule is a function of the epoch or step, or a scheduler with step(). Got {function!r}. "
            "Use for example LearningRateSchedule(lambda epoch: 0.1 * 0.9**epoch)."
        )
    required, most = _num_arguments(function)
    if required > 2 or not most:
        raise CallbackError(
            "A schedule is a function of the index, or of the index and the present rate. "
            f"Got one of {required} arguments. Use for example lambda epoch: 0.1 * 0.9**epoch."
        )
    return required == 2


def _num_arguments(function: Any) -> tuple[int, int]:
    """How many arguments a function insists on, and how many it would take (no limit counts as one)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin that does not say
        return 1, 1
    named = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    required = sum(item.default is item.empty for item in named)
    return required, len(named) + any(item.kind is item.VAR_POSITIONAL for item in parameters)


def _ratios(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Every group's rate as a multiple of the first's."""
    if rates[0] == 0 and any(rates):
        raise CallbackError(
            f"A schedule gives the first group's rate, and the others keep their ratio to it. Got {rates}. "
            "Begin with a rate above 0 in the first group."
        )
    return tuple(rate / rates[0] if rate != rates[0] else 1.0 for rate in rates)
