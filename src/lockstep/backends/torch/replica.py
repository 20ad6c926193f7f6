"""The user's own model and optimizer on one device, and what the script may change in them.

What the script writes between two steps is detected by version counters, addresses and checksums, and the other
replicas get it before the next step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch import buffers, settings, state_arrays, transformers_models
from lockstep.backends.torch.attributes import ModuleAttributes, check_shadowing, is_plain
from lockstep.backends.torch.pickling import read_own_attributes
from lockstep.backends.torch.script_changes import SavedSettings, SavedState
from lockstep.backends.torch.unsupported import check_hooks, check_model, check_optimizer, count_hooks
from lockstep.core.state import MODEL, OPTIMIZER, ArraySpec, check_state
from lockstep.core.types import Array
from lockstep.errors import ModelError, OptimizerError, StateError

CACHE_LINE = 64


class Replica:
    """A model and its optimizer on one device."""

    def __init__(self, model: nn.Module, optimizer: Any, loss: Any, device: torch.device) -> None:
        check_model(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        check_optimizer(optimizer, names)
        transformers_models.prepare(model)
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self._move()
        self.parameters = dict(model.named_parameters())
        self.modules = list(model.modules())
        self.buffers = buffers.find_buffers(model)
        self._criterion = loss if isinstance(loss, nn.Module) else nn.Module()
        self._attributes = ModuleAttributes(model, self._criterion)
        self._wrapped = self._read_identity()
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters.values())}
        modules = [*self.modules, *self._criterion.modules()]
        self._settings = SavedSettings(modules, list(self.parameters.values()), optimizer)
        self._writes = SavedState(modules, optimizer)
        self._trained: dict[str, Tensor] | None = None  # while the settings are as they were
        self._controls: dict[str, Any] | None = None
        self._period: int | None = None
        self._is_quiet = False

    def _move(self) -> None:
        """Moves all tensors to the device, into memory that starts at a cache line, as memory from torch does.

        Memory from numpy may start elsewhere, and kernels give other bits for another alignment.
        """
        self.model.to(self.device)
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            if tensor.untyped_storage().data_ptr() % CACHE_LINE:
                tensor.data = tensor.data.clone()
        for own in map(self._read_optimizer_state, self.model.parameters()):
            for key, value in own.items():
                if isinstance(value, Tensor) and value.dim():
                    own[key] = value.to(self.device)

    def _read_optimizer_state(self, parameter: Tensor) -> dict[str, Any]:
        own: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return own

    def _check_optimizer_keys(self) -> None:
        others = [key for key in self.optimizer.state if id(key) not in self._index]
        if others:
            found = f"a {type(others[0]).__name__}" if isinstance(others[0], Tensor) else repr(others[0])
            raise OptimizerError(
                f"The keys of optimizer.state must be the model's parameters. Got {found}, whose state no "
                "checkpoint would contain. Keep values that belong to no parameter, such as counters, in a parameter "
                "group or in the optimizer's own attributes."
            )

    def find_trained(self) -> dict[str, Tensor]:
        """Returns the parameters that the next update may change: in the optimizer and not frozen."""
        if self._trained is None or not self._is_quiet:
            self._look_for_settings()
        assert self._trained is not None
        return self._trained

    def _look_for_settings(self) -> None:
        if self._settings.has_changed():
            self._trained = self._controls = None
            self._settings.accept()
        if self._trained is None:
            self._trained = self._read_trained()

    def note_period(self, period: int | None) -> None:
        """Records whether code of the script has run since the last command: not within one quiet period."""
        self._is_quiet = period is not None and period == self._period
        self._period = period

    def _read_trained(self) -> dict[str, Tensor]:
        if self._read_identity() != self._wrapped:
            raise ModelError(
                "A module or parameter of the model was replaced, or a parameter has another type or other strides "
                "than in lockstep.wrap. Call lockstep.wrap again after such a change, e.g. after "
                "to(memory_format=torch.channels_last); load_state_dict works without assign=True."
            )
        self._check_optimizer_keys()
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not held <= self._index.keys():
            raise OptimizerError(
                f"{len(held - self._index.keys())} of the optimizer's parameters did not belong to the model when it "
                "was wrapped. Call lockstep.wrap again after changing the model."
            )
        trained: dict[str, Tensor] = {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and id(parameter) in held
        }
        if not trained:
            raise ModelError(
                f"No parameter would be trained: all {len(self.parameters)} are frozen or not in the optimizer. "
                "Set requires_grad=True on some, and give them to the optimizer."
            )
        return trained

    @property
    def _loss_tensors(self) -> dict[str, Tensor]:
        """The loss's parameters and buffers now, by their names in the state, because the script may set new ones."""
        own = {**dict(self._criterion.named_parameters()), **dict(self._criterion.named_buffers())}
        return {f"loss.{name}": tensor for name, tensor in own.items()}

    def _read_identity(self) -> list[Any]:
        own = [each for module in self.modules for each in module._parameters.values() if each is not None]
        parts = [part for module in self.modules if module._modules for part in module._modules.items()]
        return [*parts, *map(id, own), *[each.dtype for each in own], *map(_read_strides, own)]

    # -- what the script may change

    def touched(self) -> bool:
        """Returns whether anything was written to the state since the last call; False the first time."""
        return self._writes.has_changed()

    def accept_writes(self) -> None:
        """Records the present state, so that `touched` does not report Lockstep's own writes."""
        self._writes.accept()

    def accept_attributes(self) -> None:
        """Records the tensors that passes have left in modules' attributes as not set by the script."""
        self._attributes.accept_tensors()

    def controls(self) -> dict[str, Any]:
        """Returns hyperparameters, frozen flags, modules' plain attributes and torch's global switches.

        It is the same object as before if nothing has changed.
        """
        self._look_for_settings()  # raises for groups with parameters of another model
        switches = settings.read_switches()
        if self._controls is None or self._controls["switches"] != switches:
            self._controls = {**self._read_controls(), "switches": switches}
        return self._controls

    def _read_controls(self) -> dict[str, Any]:
        return {
            "groups": [
                {
                    "params": [self._index[id(parameter)] for parameter in group["params"]],
                    "numbers": {key: value for key, value in group.items() if key != "params"},
                }
                for group in self.optimizer.param_groups
            ],
            "trained": [parameter.requires_grad for parameter in self.parameters.values()],
            "attributes": self._attributes.read(),
            "optimizer": read_own_attributes(self.optimizer, is_plain),
            "hooks": count_hooks(self.optimizer, self.parameters.values()),
        }

    def turn(self, controls: Mapping[str, Any]) -> None:
        """Writes what `controls` returned in the script's process into model, optimizer and torch's switches."""
        self._trained = None
        check_hooks(count_hooks(self.optimizer, self.parameters.values()), controls["hooks"])
        parameters = list(self.parameters.values())
        self.optimizer.param_groups[:] = [
            {"params": [parameters[index] for index in group["params"]], **group["numbers"]}
            for group in controls["groups"]
        ]
        for parameter, trained in zip(parameters, controls["trained"], strict=True):
            parameter.requires_grad_(trained)
        self._attributes.write(controls["attributes"], self.device)
        vars(self.optimizer).update(controls["optimizer"])
        settings.write_switches(controls["switches"])

    def numbers(self) -> list[dict[str, Any]]:
        """Returns the hyperparameters of each parameter group, with scalar tensors as Python numbers."""
        return [
            {key: each.item() if isinstance(each, Tensor) else each for key, each in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes hyperparameters into the parameter groups; a learning rate that is a tensor stays one."""
        groups = self.optimizer.param_groups
        if len(numbers) != len(groups):
            raise StateError(
                f"The checkpoint does not fit this optimizer: it has {len(numbers)} groups of parameters, and the "
                f"optimizer has {len(groups)}. Give the optimizer the same groups."
            )
        for group, values in zip(groups, numbers, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def attributes(self) -> dict[str, Any]:
        """Returns what else a script may change, by name: the frozen flags, and the modules' numbers and strings."""
        trained = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        own = read_own_attributes(self.optimizer, is_plain)
        return {"trained": trained, "modules": self._attributes.read_plain(), "optimizer": own}

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Writes what `attributes` returned; a parameter that is not in it stays as it is."""
        check_shadowing(attributes["optimizer"], self.optimizer)
        self._attributes.restore(attributes["modules"])
        for name, trained in attributes["trained"].items():
            if name in self.parameters:
                self.parameters[name].requires_grad_(trained)
        vars(self.optimizer).update(attributes["optimizer"])

    # -- the state, by name

    def state_tensors(self) -> dict[str, Any]:
        """Returns the parameters, buffers and optimizer state by name: the tensors themselves, not copies."""
        self._check_optimizer_keys()
        state: dict[str, Any] = {**self._tensors()}
        for name, parameter in self.parameters.items():
            for key, value in self._read_optimizer_state(parameter).items():
                if value is not None:
                    state[f"{OPTIMIZER}{name}.{key}"] = value
        return state

    def model_arrays(self) -> dict[str, Tensor]:
        """Returns the parameters and the buffers that are part of the model's state, by the names of `state`."""
        tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self.parameters.items()}
        tensors |= {buffer.state_name: buffer.tensor for buffer in self.buffers}
        return {name: tensor.detach() for name, tensor in tensors.items() if name.startswith("model.")}

    def load(self, state: Mapping[str, Array]) -> None:
        """Writes a state into the parameters and buffers, and replaces the optimizer state."""
        check_state(state, self.specs(state))
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(state_arrays.to_tensor(state[name]))
        self.optimizer.state.clear()
        saved = _group_by_parameter(state)
        for name, parameter in self.parameters.items():
            if name in saved:
                values = saved[name].items()
                self.optimizer.state[parameter] = {
                    key: state_arrays.to_optimizer_value(value, parameter) for key, value in values
                }

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the present parameters, buffers and tensors of the loss, by their names in the state."""
        tensors: dict[str, Tensor] = {f"{MODEL}{name}": parameter for name, parameter in self.parameters.items()}
        return tensors | {buffer.state_name: buffer.tensor for buffer in self.buffers} | self._loss_tensors

    def specs(self, state: Mapping[str, Array]) -> dict[str, ArraySpec]:
        """Returns the shapes and types that a saved state must have.

        An optimizer creates its state for a parameter at the parameter's first update. So a saved state may lack the
        arrays of a parameter, and its arrays for a parameter that this optimizer has not updated yet are accepted
        without a check.
        """
        specs = {name: state_arrays.read_spec(tensor) for name, tensor in self._tensors().items()}
        for name, saved in _group_by_parameter(state).items():
            if name in self.parameters:
                own = self._read_optimizer_state(self.parameters[name]).items()
                forms = {key: state_arrays.read_spec(value) for key, value in own if value is not None}
                forms = forms or {key: ArraySpec.from_array(array) for key, array in saved.items()}
                specs |= {f"{OPTIMIZER}{name}.{key}": spec for key, spec in forms.items()}
        return specs


def _group_by_parameter(state: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Returns the arrays of the optimizer state as {parameter's name: {key: array}}."""
    result: dict[str, dict[str, Array]] = {}
    for name, array in state.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            result.setdefault(parameter, {})[key] = array
    return result


def _read_strides(tensor: Tensor) -> list[int]:
    """Returns the strides of the axes with several elements; the others have no effect on where elements are."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
