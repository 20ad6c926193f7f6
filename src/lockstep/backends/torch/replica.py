"""The replica: the user's own model and optimizer, and what the script may change in them.

They are the truth. Whatever the script writes between two steps is seen, through
torch's version counters, and reaches every other replica before the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.base import Array, State
from lockstep.backends.torch import buffers, hooks, settings, state_arrays
from lockstep.backends.torch.attributes import Attributes, check_new, is_plain
from lockstep.backends.torch.pickling import own_attributes
from lockstep.backends.torch.unsupported import check_model, check_optimizer
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
        self._seen: list[Any] = []

    def _move(self) -> None:
        """Brings everything to the device, in memory that starts at a cache line as torch's own does.

        Memory from numpy may start elsewhere, and the start of a weight is part of its bits.
        """
        self.model.to(self.device)
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            if tensor.untyped_storage().data_ptr() % CACHE_LINE:
                tensor.data = tensor.data.clone()
        for slots in map(self._slots, self.model.parameters()):
            for key, value in slots.items():
                if isinstance(value, Tensor) and value.dim():
                    slots[key] = value.to(self.device)

    def _slots(self, parameter: Tensor) -> dict[str, Any]:
        slots: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return slots

    def _check_slots(self) -> None:
        strangers = [key for key in self.optimizer.state if id(key) not in self._index]
        if strangers:
            found = f"a {type(strangers[0]).__name__}" if isinstance(strangers[0], Tensor) else repr(strangers[0])
            raise OptimizerError(
                f"An optimizer keeps its slots by the model's parameters. Got slots for {found}, which would be in no "
                "checkpoint. Keep numbers in a parameter group or in the optimizer's own attributes."
            )

    def trained(self) -> dict[str, Tensor]:
        """The parameters that the next update may change: held by the optimizer and not frozen."""
        if self._identity() != self._wrapped:
            raise ModelError(
                "A model keeps the parameters it was wrapped with, their types and strides, and its modules. Some were "
                "replaced since. Call lockstep.wrap again after changing the model, as by "
                "to(memory_format=torch.channels_last); load_state_dict works without assign=True."
            )
        self._check_slots()
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
        """The loss's tensors that are there now; the script may put new ones."""
        own = {**dict(self._criterion.named_parameters()), **dict(self._criterion.named_buffers())}
        return {f"loss.{name}": tensor for name, tensor in own.items()}

    def _identity(self) -> list[Any]:
        own = [each for module in self.modules for each in module._parameters.values() if each is not None]
        parts = [(path, id(part)) for module in self.modules for path, part in module._modules.items()]
        return [*parts, *((id(each), each.dtype, _strides(each)) for each in own)]

    # -- what the script may change

    def touched(self) -> bool:
        """Whether anything was written since the last look; looks."""
        seen, self._seen = self._seen, self._signature()
        return bool(seen) and self._seen != seen

    def look(self) -> None:
        """Takes the state as it is now for seen, where somebody asks for that."""
        self._attributes.look()
        if self._seen:
            self._seen = self._signature()

    def rest(self) -> None:
        """Takes what a pass without training has left in the modules for seen."""
        self._attributes.look()

    def _signature(self) -> list[Any]:
        """Counters, addresses and sums of bytes, for batch norm, `.data` and numpy write behind the counters' back."""
        tensors = [*self.parameters.values(), *(buffer.tensor for buffer in self.buffers), *self._loss.values()]
        result: list[Any] = [(tensor._version, tensor.data_ptr(), _checksum(tensor)) for tensor in tensors]
        for parameter in self.parameters.values():
            for value in self._slots(parameter).values():
                result.append((value._version, value.data_ptr()) if isinstance(value, Tensor) else value)
        return result

    def controls(self) -> dict[str, Any]:
        """The optimizer's numbers, the frozen flags, each module's plain attributes, and torch's global switches."""
        self.trained()  # refuses groups that hold strangers
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
        """Takes over another process's controls."""
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
        """What a parameter group holds beside its parameters, as plain values."""
        return [
            {key: _number(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes plain values into the groups; a learning rate that is a tensor stays one."""
        groups = self.optimizer.param_groups
        if len(numbers) != len(groups):
            raise StateError(
                f"The state does not fit this optimizer. It has {len(numbers)} groups of parameters, the optimizer "
                f"{len(groups)}. Give the optimizer the same groups."
            )
        for group, values in zip(groups, numbers, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def attributes(self) -> dict[str, Any]:
        """What else a script may turn, by name: the frozen flags, and the modules' numbers and words."""
        trained = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        own = own_attributes(self.optimizer, is_plain)
        return {"trained": trained, "modules": self._attributes.saved(), "optimizer": own}

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Takes them over; a parameter of which nothing was saved stays as it is."""
        check_new(attributes["optimizer"], self.optimizer)
        self._attributes.restore(attributes["modules"])
        for name, trained in attributes["trained"].items():
            if name in self.parameters:
                self.parameters[name].requires_grad_(trained)
        vars(self.optimizer).update(attributes["optimizer"])

    # -- the state, by name

    def state(self) -> State:
        """Parameters, buffers and optimizer slots."""
        self._check_slots()
        state = {f"model.{name}": state_arrays.array(parameter) for name, parameter in self.parameters.items()}
        state |= {buffer.state_name: state_arrays.array(buffer.tensor) for buffer in self.buffers}
        state |= {name: state_arrays.array(tensor) for name, tensor in self._loss.items()}
        for name, parameter in self.parameters.items():
            for key, value in self._slots(parameter).items():
                if value is not None:
                    state[f"optimizer.{name}.{key}"] = state_arrays.array(value)
        return state

    def model_arrays(self) -> dict[str, Tensor]:
        """Parameters and the buffers that are part of the model's state, by the names of `state`."""
        tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self.parameters.items()}
        tensors |= {buffer.state_name: buffer.tensor for buffer in self.buffers}
        return {name: tensor.detach() for name, tensor in tensors.items() if name.startswith("model.")}

    def load(self, state: Mapping[str, Array]) -> None:
        """Takes over a state: every parameter and buffer in place, the optimizer's slots as they come."""
        self._check(state)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state_arrays.tensor(state[f"model.{name}"]))
            for buffer in self.buffers:
                buffer.tensor.copy_(state_arrays.tensor(state[buffer.state_name]))
            for name, tensor in self._loss.items():
                tensor.copy_(state_arrays.tensor(state[name]))
        self.optimizer.state.clear()
        for name, parameter in self.parameters.items():
            prefix = f"optimizer.{name}."
            slots = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
            slots = {key: value for key, value in slots.items() if f"{name}.{key}".rpartition(".")[0] == name}
            if slots:
                self.optimizer.state[parameter] = {key: self._slot(value, parameter) for key, value in slots.items()}

    def _slot(self, value: Array, parameter: Tensor) -> Any:
        """A slot of the parameter's shape lies in memory as the parameter does, as the optimizer itself makes it."""
        if value.dtype == "python":
            return value.data.item()
        tensor = state_arrays.tensor(value)
        if tensor.shape == parameter.shape and tensor.stride() != parameter.stride():
            return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
        return tensor.to(self.device) if tensor.dim() else tensor

    def _check(self, state: Mapping[str, Array]) -> None:
        own: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self.parameters.items()}
        own |= {buffer.state_name: buffer.tensor for buffer in self.buffers}
        own |= self._loss
        for name, tensor in own.items():
            if name not in state:
                raise StateError(
                    f"The state does not fit this model. It has nothing for {_short(name)!r}. "
                    "Load the state of this model."
                )
            there = state[name].data.shape, state[name].dtype
            here = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if there != here:
                both = zip(there, here, strict=True)
                found, wanted = next((theirs, ours) for theirs, ours in both if theirs != ours)
                raise StateError(
                    f"The state does not fit this model. At {_short(name)!r} it has {found}, the model {wanted}. "
                    "Load the state of this model."
                )
        for name in state:
            if name.startswith(("model.", "buffers.")) and name not in own:
                raise StateError(
                    f"The state does not fit this model, which has no {_short(name)!r}. Load the state of this model."
                )
            if name.startswith("optimizer.") and f"model.{_short(name).rpartition('.')[0]}" not in own:
                raise StateError(
                    f"The state does not fit this optimizer: it has {_short(name)!r}, and the model no such parameter. "
                    "Load the state of this model and optimizer."
                )


def _short(name: str) -> str:
    return name.partition(".")[2]


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
