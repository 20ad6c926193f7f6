"""Learning rate schedules: a function of the epoch or step, or a scheduler of a framework.

As in Keras, a function is called before each epoch or step and returns its learning rate. As in PyTorch, the method
`step` of a scheduler is called after each epoch or step.
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
    """Protocol of both kinds of schedule: functions and schedulers."""

    def start(self) -> None:
        """Prepares the schedule for a new `fit`."""

    def set_rates(self, trainer: Any, index: int) -> None:
        """Sets the learning rates for the step or epoch `index`, before it begins."""

    def advance(self) -> None:
        """Advances the schedule after a step or epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the schedule as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state that `state_dict` returned."""


class LearningRateSchedule(Callback):
    """Sets the learning rates for every epoch, or for every step with `per="step"`.

    `schedule` is a function or a scheduler. A function gets the index of the epoch in this `fit`, or of the step in the
    whole run, counted from 0; a function that requires two arguments also gets the current learning rate. It returns
    the learning rate of the first group of parameters, and the other groups keep their ratio to this rate. A scheduler
    is an object with `step()` and `state_dict()`, such as a scheduler of PyTorch. Its `step` is called after every
    epoch or step, and its state is part of a checkpoint.

    >>> import lockstep, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.5), torch.nn.CrossEntropyLoss()
    >>> halved = LearningRateSchedule(lambda epoch: 0.5 * 0.5**epoch)
    >>> with lockstep.wrap(net, sgd, loss) as trainer:
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
    """A schedule that is a function of the index, or of the index and the current learning rate."""

    def __init__(self, function: Callable[..., Any], per: str) -> None:
        self._function = function
        self._per = per
        self._takes_rate = _takes_rate(function)
        self._ratios: tuple[float, ...] = ()
        self.start()

    def start(self) -> None:
        self._last: int | None = None

    def set_rates(self, trainer: Any, index: int) -> None:
        # A run that is resumed in the middle of an epoch begins this epoch again, with its rate already set.
        if index == self._last:
            return
        rates = read_learning_rates(trainer, "LearningRateSchedule")
        # After a rate of 0 the ratios cannot be computed again, so the earlier ratios are used.
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
    """A schedule that is a scheduler of a framework, which sets the optimizer's learning rates itself."""

    def __init__(self, scheduler: Any) -> None:
        if not callable(getattr(scheduler, "state_dict", None)):
            raise CallbackError(
                f"The scheduler {type(scheduler).__name__} has no state_dict(), which a checkpoint needs. Add a "
                "state_dict method to its class, or use a function of the epoch or step."
            )
        if _count_arguments(scheduler.step)[0]:
            raise CallbackError(
                f"LearningRateSchedule calls step() without arguments, but {type(scheduler).__name__}.step requires an "
                "argument. Use lockstep.ReduceLROnPlateau if the argument is a metric."
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
    """Returns the trainer's learning rates; raises if its optimizer has no learning rate that can be changed.

    >>> from types import SimpleNamespace
    >>> read_learning_rates(SimpleNamespace(learning_rates=(0.1,)), "ReduceLROnPlateau")
    (0.1,)
    """
    rates: tuple[float, ...] = trainer.learning_rates
    if not rates:
        raise CallbackError(
            f"{callback} cannot change the learning rate of this optimizer, because the learning rate is not part of "
            "the optimizer's state. Use optax.inject_hyperparams, or a schedule of the framework."
        )
    return rates


def _takes_rate(function: Any) -> bool:
    """Returns whether a function requires the current learning rate beside the index.

    Raises CallbackError if the value is not a function, or cannot be called with one or two arguments.
    """
    if not callable(function):
        raise CallbackError(
            f"A schedule must be a function of the epoch or step, or a scheduler with step(). Got {function!r}. "
            "Use for example LearningRateSchedule(lambda epoch: 0.1 * 0.9**epoch)."
        )
    required, most = _count_arguments(function)
    if required > 2 or not most:
        raise CallbackError(
            "A schedule must be a function of the epoch or step number, or of that number and the current learning "
            f"rate. Got a function with {required} required arguments. Use for example lambda epoch: 0.1 * 0.9**epoch."
        )
    return required == 2


def _count_arguments(function: Any) -> tuple[int, int]:
    """Returns how many positional arguments a function requires, and how many it can take (`*args` counts as one)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return 1, 1
    named = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    required = sum(item.default is item.empty for item in named)
    return required, len(named) + any(item.kind is item.VAR_POSITIONAL for item in parameters)


def _compute_ratios(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the learning rate of each group of parameters divided by the rate of the first group."""
    if rates[0] == 0 and any(rates):
        raise CallbackError(
            f"The learning rates of the groups of parameters are {rates}. LearningRateSchedule keeps the ratio of each "
            "rate to the first rate, so the first rate must not be 0. Begin with a rate above 0 in the first group."
        )
    return tuple(rate / rates[0] if rate != rates[0] else 1.0 for rate in rates)
