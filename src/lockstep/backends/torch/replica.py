"""The user's own model and optimizer on one device, and what the script may change in them.

Whatever the script writes between two steps is detected through torch's version counters,
and the other replicas get it before the next step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.base import Array, State
from lockstep.backends.change_detector import ChangeDetector
from lockstep.backends.torch import buffers, hooks, settings, state_arrays
from lockstep.backends.torch.attributes import Attributes, check_new, is_plain
from lockstep.backends.torch.pickling import own_attributes
from lockstep.backends.torch.unsupported import check_model, check_optimizer
from lockstep.core.state import MODEL, OPTIMIZER, ArraySpec, check_state
from lockstep.errors import ModelError, OptimizerError, StateError

CACHE_LINE = 64


class Replica:
    """A model and its optimizer on one device."""

    def __init__(self, model: nn.Module, optimizer: Any, loss: Any, device: torch.device) -> None:
        check_model(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        check_optimizer(optimizer, names)
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self._move()
        self.parameters = dict(model.named_parameters())
        self.modules = list(model.modules())
        self.buffers = buffers.of(model)
        self._criterion = loss if isinstance(loss, nn.Module) else nn.Module()
        self._attributes = Attributes(model, self._criterion)
        self._wrapped = self._identity()
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters.values())}
        self._writes = ChangeDetector(self._read_marks)

    def _move(self) -> None:
        """Bring everything to the device, into memory that starts at a cache line as torch's own does.

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
        strangers = [key for key in self.optimizer.state if id(key) not in self._index]
        if strangers:
            found = f"a {type(strangers[0]).__name__}" if isinstance(strangers[0], Tensor) else repr(strangers[0])
            raise OptimizerError(
                f"The keys of optimizer.state must be the model's parameters. Got {found}, whose state no checkpoint "
                "would hold. Keep numbers in a parameter group or in the optimizer's own attributes."
            )

    def find_trained(self) -> dict[str, Tensor]:
        """Return the parameters that the next update may change: in the optimizer and not frozen."""
        if self._identity() != self._wrapped:
            raise ModelError(
                "A model keeps the parameters it was wrapped with, their types and strides, and its modules. Some were "
                "replaced since. Call lockstep.wrap again after changing the model, as by "
                "to(memory_format=torch.channels_last); load_state_dict works without assign=True."
            )
        self._check_optimizer_keys()
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not held <= self._index.keys():
            raise OptimizerError(
                "A parameter group holds parameters that the model had when it was wrapped. Got one with others. "
                "Call lockstep.wrap again after changing the model."
            )
        trained: dict[str, Tensor] = {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and id(parameter) in held
        }
        if not trained:
            raise ModelError(
                f"Training needs a parameter to train. Got {len(self.parameters)}, all frozen or not in the optimizer. "
                "Set requires_grad=True on some, and give them to the optimizer."
            )
        return trained

    @property
    def _loss(self) -> dict[str, Tensor]:
        """The loss's tensors that are there now, because the script may put new ones."""
        own = {**dict(self._criterion.named_parameters()), **dict(self._criterion.named_buffers())}
        return {f"loss.{name}": tensor for name, tensor in own.items()}

    def _identity(self) -> list[Any]:
        own = [each for module in self.modules for each in module._parameters.values() if each is not None]
        parts = [(path, id(part)) for module in self.modules for path, part in module._modules.items()]
        return [*parts, *((id(each), each.dtype, _strides(each)) for each in own)]

    # -- what the script may change

    def touched(self) -> bool:
        """Return whether anything was written since the last question."""
        return self._writes.has_changed()

    def accept_writes(self) -> None:
        """Take the state and the attributes as they are now as known."""
        self._attributes.look()
        self._writes.accept()

    def accept_attributes(self) -> None:
        """Take what a pass without training has left in the modules as known."""
        self._attributes.look()

    def _read_marks(self) -> list[Any]:
        """Read counters, addresses and sums of bytes; writes by batch norm, `.data` and numpy change no counter."""
        tensors = [*self.parameters.values(), *(buffer.tensor for buffer in self.buffers), *self._loss.values()]
        result: list[Any] = [(tensor._version, tensor.data_ptr(), _checksum(tensor)) for tensor in tensors]
        for parameter in self.parameters.values():
            for value in self._read_optimizer_state(parameter).values():
                result.append((value._version, value.data_ptr()) if isinstance(value, Tensor) else value)
        return result

    def controls(self) -> dict[str, Any]:
        """Return the optimizer's numbers, the frozen flags, modules' plain attributes and torch's global switches."""
        self.find_trained()  # refuses groups that hold strangers
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
            "switches": settings.switches(),
            "optimizer": own_attributes(self.optimizer, is_plain),
            "hooks": hooks.count(self.optimizer, self.parameters.values()),
        }

    def turn(self, controls: Mapping[str, Any]) -> None:
        """Take over another process's controls."""
        hooks.check(hooks.count(self.optimizer, self.parameters.values()), controls["hooks"])
        parameters = list(self.parameters.values())
        self.optimizer.param_groups[:] = [
            {"params": [parameters[index] for index in group["params"]], **group["numbers"]}
            for group in controls["groups"]
        ]
        for parameter, trained in zip(parameters, controls["trained"], strict=True):
            parameter.requires_grad_(trained)
        self._attributes.write(controls["attributes"], self.device)
        vars(self.optimizer).update(controls["optimizer"])
        settings.flip(controls["switches"])

    def numbers(self) -> list[dict[str, Any]]:
        """Return what a parameter group holds beside its parameters, as plain values."""
        return [
            {key: _number(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Write plain values into the groups; a learning rate that is a tensor stays one."""
        groups = self.optimizer.param_groups
        if len(numbers) != len(groups):
            raise StateError(
                f"The checkpoint does not fit this optimizer. It has {len(numbers)} groups of parameters, the "
                f"optimizer {len(groups)}. Give the optimizer the same groups."
            )
        for group, values in zip(groups, numbers, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def attributes(self) -> dict[str, Any]:
        """Return what else a script may change, by name: the frozen flags, and the modules' numbers and strings."""
        trained = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        own = own_attributes(self.optimizer, is_plain)
        return {"trained": trained, "modules": self._attributes.saved(), "optimizer": own}

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Write such values; a parameter of which nothing was saved stays as it is."""
        check_new(attributes["optimizer"], self.optimizer)
        self._attributes.restore(attributes["modules"])
        for name, trained in attributes["trained"].items():
            if name in self.parameters:
                self.parameters[name].requires_grad_(trained)
        vars(self.optimizer).update(attributes["optimizer"])

    # -- the state, by name

    def state(self) -> State:
        """Return a copy of the parameters, the buffers and the optimizer state."""
        self._check_optimizer_keys()
        state = {name: state_arrays.to_array(tensor) for name, tensor in self._tensors().items()}
        for name, parameter in self.parameters.items():
            for key, value in self._read_optimizer_state(parameter).items():
                if value is not None:
                    state[f"{OPTIMIZER}{name}.{key}"] = state_arrays.to_array(value)
        return state

    def model_arrays(self) -> dict[str, Tensor]:
        """Parameters and the buffers that are part of the model's state, by the names of `state`."""
        tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self.parameters.items()}
        tensors |= {buffer.state_name: buffer.tensor for buffer in self.buffers}
        return {name: tensor.detach() for name, tensor in tensors.items() if name.startswith("model.")}

    def load(self, state: Mapping[str, Array]) -> None:
        """Write a state into the parameters and buffers, and replace the optimizer state."""
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
        """The parameters, the buffers and the loss's tensors that are there now, by their names in the state."""
        tensors: dict[str, Tensor] = {f"{MODEL}{name}": parameter for name, parameter in self.parameters.items()}
        return tensors | {buffer.state_name: buffer.tensor for buffer in self.buffers} | self._loss

    def specs(self, state: Mapping[str, Array]) -> dict[str, ArraySpec]:
        """Describe the arrays that a saved state must have.

        An optimizer makes its state for a parameter when it first updates it. So a saved state may have nothing for a
        parameter, and what it has for one that this optimizer has not updated yet is taken as it is.
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
    """The arrays of the optimizer state: parameter -> key -> array."""
    result: dict[str, dict[str, Array]] = {}
    for name, array in state.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            result.setdefault(parameter, {})[key] = array
    return result


def _strides(tensor: Tensor) -> list[int]:
    """Those that tell where elements lie; along an axis of one there is no next."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _checksum(tensor: Tensor) -> int:
    """The sum of a CPU tensor's words; a GPU's would make every step wait for it."""
    if tensor.device.type != "cpu":
        return 0
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return int((flat.view(torch.int64) if not len(flat) % 8 else flat).sum())
