"""The first replica's optimizer, which a script gives as a name, an mx.optimizer object or a gluon.Trainer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon

from lockstep.backends.mxnet.updater_state import UpdaterState
from lockstep.core.state import OPTIMIZER, ArraySpec
from lockstep.core.types import Array, State
from lockstep.errors import OptimizerError

_PLAIN = (bool, int, float, type(None))
_COUNTERS = ("num_update", "m_schedule")
_COUNT = ".count"  # after a parameter's name: how often the parameter was updated
_SCHEDULER = f"{OPTIMIZER}lr_scheduler."
_NUMBER = "python"  # the dtype of a plain Python number
# Attributes that are not hyperparameters: counters, and values that a step sets itself.
_HIDDEN = {*_COUNTERS, "begin_num_update", "rescale_grad", "aggregate_num", "allow_np_array", "aggregate_updates"}
_WRITES_GRADIENTS = (mx.optimizer.AdaDelta,)


class OptimizerAdapter:
    """The script's optimizer, its parameters, and its state for each of them."""

    def __init__(self, given: Any, parameters: Mapping[str, Any]) -> None:
        self._trainer = given if isinstance(given, gluon.Trainer) else None
        names = {id(parameter): name for name, parameter in parameters.items()}
        if self._trainer is not None:
            self.updater, owned = _read_trainer(self._trainer)
        else:
            owned = list(parameters.values())
            self.updater = given if isinstance(given, mx.optimizer.Updater) else None
            if self.updater is None:
                self.updater = mx.optimizer.get_updater(create_optimizer(given))
            self.updater.optimizer.param_dict = dict(enumerate(owned))
        num_others = sum(id(parameter) not in names for parameter in owned)
        if num_others:
            raise OptimizerError(
                f"The gluon.Trainer has {num_others} parameters that the block does not have. "
                "Create the Trainer from this block: gluon.Trainer(net.collect_params(), 'sgd')."
            )
        self.optimizer = self.updater.optimizer
        self._parameters = [(index, names[id(parameter)], parameter) for index, parameter in enumerate(owned)]
        self.state = UpdaterState(self.updater, [(index, name) for index, name, _ in self._parameters])

    def find_trained(self) -> dict[str, tuple[int, Any]]:
        """Returns the parameters that the next update changes, each with its index in the optimizer."""
        return {name: (index, each) for index, name, each in self._parameters if each.grad_req != "null"}

    @property
    def writes_gradients(self) -> bool:
        """Whether the optimizer may write to the gradients that it is given.

        This is assumed to be true for classes that are not MXNet's own.
        """
        is_known = type(self.optimizer).__module__ == "mxnet.optimizer.optimizer"
        return not is_known or isinstance(self.optimizer, _WRITES_GRADIENTS)

    def apply(self, gradients: Sequence[tuple[int, Any, Any]], divisor: float, factor: float) -> None:
        """Makes one update with (index, gradient, array) for each parameter; gradients are divided, then scaled."""
        if not gradients:
            return
        indices, values, arrays = zip(*gradients, strict=True)
        with self._rescale_gradients(divisor, factor):
            self.updater(list(indices), list(values), list(arrays))

    @contextmanager
    def _rescale_gradients(self, divisor: float, factor: float) -> Iterator[None]:
        """Opens a context in which the optimizer scales gradients as `Trainer.step` does."""
        before = self.optimizer.rescale_grad
        scale = before if self._trainer is None else self._trainer._scale
        self.optimizer.rescale_grad = scale / divisor * factor
        try:
            yield
        finally:
            self.optimizer.rescale_grad = before

    # -- hyperparameters and counters

    def read_hyperparameters(self) -> dict[str, Any]:
        """Returns what the script may set, by the optimizer's own names; `lr` is the current learning rate."""
        found = {
            name: value
            for name, value in vars(self.optimizer).items()
            if type(value) in _PLAIN and name not in _HIDDEN and not name.startswith("_")
        }
        return {**found, "lr": float(self.optimizer.learning_rate)}

    def set_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Sets hyperparameters; raises OptimizerError if a schedule sets the learning rate to another value."""
        scheduler = self.optimizer.lr_scheduler
        for name, value in values.items():
            if name == "lr" and scheduler is not None:
                if value != self.optimizer.learning_rate:
                    raise OptimizerError(
                        f"Cannot set lr={value}, because the optimizer's lr_scheduler sets the learning rate, now "
                        f"{self.optimizer.learning_rate}. Leave out lr_scheduler to set lr yourself."
                    )
            else:
                setattr(self.optimizer, name, value)

    def read_counters(self, device_id: int) -> State:
        """Returns copies of the counters of the optimizer and of its learning-rate schedule."""
        self.optimizer._set_current_context(device_id)
        state = {f"{OPTIMIZER}{name}": _to_array(getattr(self.optimizer, name)) for name in self._list_counters()}
        for index, name, _ in self._parameters:
            if index in self.optimizer._index_update_count:
                state[f"{OPTIMIZER}{name}{_COUNT}"] = _to_array(self.optimizer._index_update_count[index])
        for name, value in self._read_schedule().items():
            state[f"{_SCHEDULER}{name}"] = _to_array(value)
        return state

    def describe_counters(self, state: Mapping[str, Array]) -> dict[str, ArraySpec]:
        """Returns the specs of the counters in a saved state; counters of parameters and a schedule may be missing."""
        names = [f"{OPTIMIZER}{name}" for name in self._list_counters()]
        names += [name for _, name in self._list_saved_counts(state)]
        names += [f"{_SCHEDULER}{name}" for name in self._list_saved_schedule(state)]
        return dict.fromkeys(names, ArraySpec((), _NUMBER))

    def load_counters(self, state: Mapping[str, Array], device_id: int) -> None:
        """Sets the counters to the values in a state, which was checked before."""
        self.optimizer._set_current_context(device_id)
        for name in self._list_counters():
            setattr(self.optimizer, name, state[f"{OPTIMIZER}{name}"].data.item())
        self.optimizer._index_update_count.clear()
        for index, name in self._list_saved_counts(state):
            self.optimizer._index_update_count[index] = state[name].data.item()
        for name in self._list_saved_schedule(state):
            setattr(self.optimizer.lr_scheduler, name, state[f"{_SCHEDULER}{name}"].data.item())

    def _list_counters(self) -> list[str]:
        return [name for name in _COUNTERS if hasattr(self.optimizer, name)]

    def _list_saved_counts(self, state: Mapping[str, Array]) -> list[tuple[int, str]]:
        """Lists (index in the optimizer, name of the count in the state) of every parameter that was updated."""
        names = [(index, f"{OPTIMIZER}{name}{_COUNT}") for index, name, _ in self._parameters]
        return [(index, name) for index, name in names if name in state]

    def _read_schedule(self) -> dict[str, Any]:
        scheduler = self.optimizer.lr_scheduler
        plain = {} if scheduler is None else vars(scheduler)
        return {name: value for name, value in plain.items() if type(value) in (bool, int, float)}

    def _list_saved_schedule(self, state: Mapping[str, Array]) -> list[str]:
        """Returns the names of a saved schedule's attributes that the optimizer's own schedule has, too."""
        names = [name.removeprefix(_SCHEDULER) for name in state if name.startswith(_SCHEDULER)]
        return [name for name in names if hasattr(self.optimizer.lr_scheduler, name)]


def _to_array(value: Any) -> Array:
    return Array(np.asarray(value), _NUMBER)


def _read_trainer(trainer: Any) -> tuple[Any, list[Any]]:
    """Returns the updater and parameters of a gluon.Trainer."""
    if getattr(trainer, "_amp_loss_scaler", None) is not None:
        raise OptimizerError(
            "A gluon.Trainer with amp's loss scaler is not supported, because it reads the gradients of one context. "
            "Leave out amp.init_trainer; use net.cast('float16') with multi_precision=True."
        )
    if trainer._kv_initialized and trainer._update_on_kvstore:
        raise OptimizerError(
            "The gluon.Trainer has its optimizer state in a kvstore, where Lockstep cannot read it. "
            "Create the Trainer with gluon.Trainer(..., update_on_kvstore=False)."
        )
    return trainer._updaters[0], list(trainer._params)


def create_optimizer(given: Any) -> Any:
    """Creates the optimizer for a name, or for a name and its arguments; returns any other value as it is."""
    if isinstance(given, mx.optimizer.Optimizer | mx.optimizer.Updater | gluon.Trainer):
        return given
    name, arguments = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise OptimizerError(
            f"optimizer={given!r} is not an optimizer. Use a name, (name, {{...}}), an mx.optimizer object or a "
            "gluon.Trainer, e.g. ('sgd', {'learning_rate': 0.1})."
        )
    if name.lower() not in mx.optimizer.Optimizer.opt_registry:
        raise OptimizerError(
            f"There is no optimizer named {name!r}. "
            f"Use one of {', '.join(sorted(mx.optimizer.Optimizer.opt_registry))}, or an mx.optimizer object."
        )
    try:
        return mx.optimizer.create(name, **arguments)
    except TypeError as error:
        raise OptimizerError(
            f"Optimizer {name!r} cannot be created with {dict(arguments)!r}: {error}. "
            "Its arguments are in the documentation of mx.optimizer."
        ) from None
