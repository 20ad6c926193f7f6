"""The optimizer on the first replica, in whatever form the script gave it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon

from lockstep.backends.base import Array, State
from lockstep.backends.mxnet.updater_state import UpdaterState
from lockstep.core.state import OPTIMIZER, ArraySpec
from lockstep.errors import OptimizerError

_PLAIN = (bool, int, float, type(None))
# Not for the script to set: counters, and what a step sets for itself.
_COUNTERS = ("num_update", "m_schedule")
_COUNT = ".count"  # after a parameter's name: how often it was updated
_SCHEDULER = f"{OPTIMIZER}lr_scheduler."
_NUMBER = "python"  # the dtype of a plain Python number
_HIDDEN = {*_COUNTERS, "begin_num_update", "rescale_grad", "aggregate_num", "allow_np_array", "aggregate_updates"}
_WRITES_GRADIENTS = (mx.optimizer.AdaDelta,)


class Updates:
    """An optimizer, the parameters it trains and what it keeps for each of them."""

    def __init__(self, given: Any, parameters: Mapping[str, Any]) -> None:
        self._trainer = given if isinstance(given, gluon.Trainer) else None
        names = {id(parameter): name for name, parameter in parameters.items()}
        if self._trainer is not None:
            self.updater, held = _of_trainer(self._trainer)
        else:
            held = list(parameters.values())
            self.updater = given if isinstance(given, mx.optimizer.Updater) else None
            if self.updater is None:
                self.updater = mx.optimizer.get_updater(made(given))
            self.updater.optimizer.param_dict = dict(enumerate(held))
        strangers = sum(id(parameter) not in names for parameter in held)
        if strangers:
            raise OptimizerError(
                f"The trainer holds the block's own parameters. Got {strangers} that the block does not have. "
                "Make it from this block: gluon.Trainer(net.collect_params(), 'sgd')."
            )
        self.optimizer = self.updater.optimizer
        self._held = [(index, names[id(parameter)], parameter) for index, parameter in enumerate(held)]
        self.state = UpdaterState(self.updater, [(index, name) for index, name, _ in self._held])

    def trained(self) -> dict[str, tuple[int, Any]]:
        """The parameters that the next update may change, with the optimizer's index for each."""
        return {name: (index, each) for index, name, each in self._held if each.grad_req != "null"}

    @property
    def writes_gradients(self) -> bool:
        """Whether the optimizer may write to the gradient it is given; strangers are not to be trusted."""
        known = type(self.optimizer).__module__ == "mxnet.optimizer.optimizer"
        return not known or isinstance(self.optimizer, _WRITES_GRADIENTS)

    def apply(self, gradients: Sequence[tuple[int, Any, Any]], divisor: float, factor: float) -> None:
        """One update with (index, gradient, array) for each parameter; gradients are divided, then scaled."""
        if not gradients:
            return
        indices, values, arrays = zip(*gradients, strict=True)
        with self._rescaled(divisor, factor):
            self.updater(list(indices), list(values), list(arrays))

    @contextmanager
    def _rescaled(self, divisor: float, factor: float) -> Iterator[None]:
        """Inside, gradients are scaled as `Trainer.step` does it."""
        before = self.optimizer.rescale_grad
        scale = before if self._trainer is None else self._trainer._scale
        self.optimizer.rescale_grad = scale / divisor * factor
        try:
            yield
        finally:
            self.optimizer.rescale_grad = before

    # -- plain numbers

    def numbers(self) -> dict[str, Any]:
        """What the script may set, by the optimizer's own names; `lr` is the rate in force."""
        found = {
            name: value
            for name, value in vars(self.optimizer).items()
            if type(value) in _PLAIN and name not in _HIDDEN and not name.startswith("_")
        }
        return {**found, "lr": float(self.optimizer.learning_rate)}

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Takes them over; a rate that follows a schedule is the schedule's."""
        scheduler = self.optimizer.lr_scheduler
        for name, value in numbers.items():
            if name == "lr" and scheduler is not None:
                if value != self.optimizer.learning_rate:
                    raise OptimizerError(
                        f"The optimizer's lr_scheduler sets the learning rate. Got lr={value}, the schedule has "
                        f"{self.optimizer.learning_rate}. Leave out lr_scheduler to set it yourself."
                    )
            else:
                setattr(self.optimizer, name, value)

    def counters(self, device_id: int) -> State:
        """Copy how far the optimizer and its schedule have come."""
        self.optimizer._set_current_context(device_id)
        state = {f"{OPTIMIZER}{name}": _to_array(getattr(self.optimizer, name)) for name in self._own_counters()}
        for index, name, _ in self._held:
            if index in self.optimizer._index_update_count:
                state[f"{OPTIMIZER}{name}{_COUNT}"] = _to_array(self.optimizer._index_update_count[index])
        for name, value in self._schedule().items():
            state[f"{_SCHEDULER}{name}"] = _to_array(value)
        return state

    def counter_specs(self, state: Mapping[str, Array]) -> dict[str, ArraySpec]:
        """Describe the counters that a saved state must have; those of parameters and of a schedule may be missing."""
        names = [f"{OPTIMIZER}{name}" for name in self._own_counters()]
        names += [name for _, name in self._saved_counts(state)]
        names += [f"{_SCHEDULER}{name}" for name in self._saved_schedule(state)]
        return dict.fromkeys(names, ArraySpec((), _NUMBER))

    def set_counters(self, state: Mapping[str, Array], device_id: int) -> None:
        """Go back, or on, to where the counters of a state that fits say."""
        self.optimizer._set_current_context(device_id)
        for name in self._own_counters():
            setattr(self.optimizer, name, state[f"{OPTIMIZER}{name}"].data.item())
        self.optimizer._index_update_count.clear()
        for index, name in self._saved_counts(state):
            self.optimizer._index_update_count[index] = state[name].data.item()
        for name in self._saved_schedule(state):
            setattr(self.optimizer.lr_scheduler, name, state[f"{_SCHEDULER}{name}"].data.item())

    def _own_counters(self) -> list[str]:
        return [name for name in _COUNTERS if hasattr(self.optimizer, name)]

    def _saved_counts(self, state: Mapping[str, Array]) -> list[tuple[int, str]]:
        """The optimizer's index of every parameter that was updated, and the name of its count in the state."""
        names = [(index, f"{OPTIMIZER}{name}{_COUNT}") for index, name, _ in self._held]
        return [(index, name) for index, name in names if name in state]

    def _schedule(self) -> dict[str, Any]:
        scheduler = self.optimizer.lr_scheduler
        plain = {} if scheduler is None else vars(scheduler)
        return {name: value for name, value in plain.items() if type(value) in (bool, int, float)}

    def _saved_schedule(self, state: Mapping[str, Array]) -> list[str]:
        """The attributes of a schedule that the state has, if the optimizer's own schedule has them too."""
        names = [name.removeprefix(_SCHEDULER) for name in state if name.startswith(_SCHEDULER)]
        return [name for name in names if hasattr(self.optimizer.lr_scheduler, name)]


def _to_array(value: Any) -> Array:
    return Array(np.asarray(value), _NUMBER)


def _of_trainer(trainer: Any) -> tuple[Any, list[Any]]:
    """The trainer's own updater and parameters."""
    if getattr(trainer, "_amp_loss_scaler", None) is not None:
        raise OptimizerError(
            "Every replica takes the same step. Got a trainer with amp's loss scaler, which looks at one context. "
            "Leave out amp.init_trainer; net.cast('float16') with multi_precision=True works."
        )
    if trainer._kv_initialized and trainer._update_on_kvstore:
        raise OptimizerError(
            "The optimizer state lies where Lockstep can see it. Got a trainer that has made steps in a kvstore. "
            "Make a new one, or use gluon.Trainer(..., update_on_kvstore=False)."
        )
    return trainer._updaters[0], list(trainer._params)


def made(given: Any) -> Any:
    """The optimizer that a name, or a name and its numbers, stands for; anything else as it is."""
    if isinstance(given, mx.optimizer.Optimizer | mx.optimizer.Updater | gluon.Trainer):
        return given
    name, numbers = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
    if not isinstance(name, str) or not isinstance(numbers, Mapping):
        raise OptimizerError(
            f"An optimizer is a name, (name, {{...}}), an mx.optimizer object or a gluon.Trainer. Got {given!r}. "
            "Use for example ('sgd', {'learning_rate': 0.1})."
        )
    if name.lower() not in mx.optimizer.Optimizer.opt_registry:
        raise OptimizerError(
            f"An optimizer's name is one of {', '.join(sorted(mx.optimizer.Optimizer.opt_registry))}. Got {name!r}. "
            "Use one of these, or an mx.optimizer object."
        )
    try:
        return mx.optimizer.create(name, **numbers)
    except TypeError as error:
        raise OptimizerError(
            f"An optimizer takes the arguments that it has. Got {dict(numbers)!r} for {name!r}: {error}. "
            "Look them up in mx.optimizer."
        ) from None
