"""Replicas: the user's own block, and its parameters on every context.

The block is the truth, on the first context. Only while Lockstep computes do its
parameters lie on the other contexts too, copied from the first just before. So
whatever the script has written, and however, every replica starts from it; and the
block that the script saves or runs between the steps is an ordinary one.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx
from mxnet import autograd

from lockstep.backends.mxnet.arrays import accumulated, classic, dtype_of
from lockstep.backends.mxnet.unsupported import check_parameters
from lockstep.errors import ModelError


class Replicas:
    """A block whose parameters are spread over the contexts and gathered again."""

    def __init__(self, block: Any, contexts: Sequence[Any]) -> None:
        self.block = block
        self.parameters = named(block)
        self.trained: Collection[str] | None = None  # the parameters whose gradients go into the leaves, once known
        check_parameters(self.parameters)
        self.move(contexts)

    def move(self, contexts: Sequence[Any]) -> None:
        """Takes these contexts, the first for the block itself; replicas may share one."""
        self.contexts = list(dict.fromkeys(contexts))
        self._spread: dict[str, tuple[Any, list[Any]]] = {}  # each parameter's form and arrays on the other contexts
        for parameter in self.parameters.values():
            self._place(parameter)

    def _place(self, parameter: Any) -> None:
        """Brings a parameter to the first context; one that the script has spread itself stays there too."""
        first = self.contexts[0]
        if first in parameter.list_ctx():
            return
        if parameter._data is None:
            parameter.reset_ctx(first)
        else:
            with autograd.pause():
                parameter._init_impl(parameter.list_data()[0], [first])

    @property
    def missing(self) -> list[str]:
        """The parameters whose shape no batch has told yet."""
        return [name for name, parameter in self.parameters.items() if parameter._data is None]

    def require(self) -> None:
        """Raises where a parameter has no shape yet."""
        if self.missing:
            raise ModelError(
                f"A parameter has a shape before it has a state. {self.missing[0]!r} learns its from the first batch. "
                "Make a step first, or name the shape: in_units, in_channels."
            )

    def array(self, name: str) -> Any:
        """A parameter on the first context."""
        return self.parameters[name].data(self.contexts[0])

    def field(self, name: str) -> tuple[str, str, tuple[int, ...]]:
        """A parameter's name, type of accumulation and shape."""
        array = self.array(name)
        return name, accumulated(dtype_of(array)), tuple(array.shape)

    def wide(self) -> bool:
        """Whether some parameter is float64."""
        return any(dtype_of(parameter) == "float64" for parameter in self.parameters.values())

    @contextmanager
    def spread(self) -> Iterator[dict[str, list[Any]]]:
        """Inside, the block can be called on every context; gives each parameter's arrays in their order."""
        found = {name: [self.array(name), *self._others(name)] for name in self.parameters}
        before = [(each, each._data, each._ctx_list, each._ctx_map) for each in self.parameters.values()]
        numbers = _numbered(self.contexts)
        try:
            for name, parameter in self.parameters.items():
                parameter._data, parameter._ctx_list, parameter._ctx_map = found[name], self.contexts, numbers
            yield found
        finally:
            for parameter, *own in before:
                parameter._data, parameter._ctx_list, parameter._ctx_map = own

    def _others(self, name: str) -> list[Any]:
        """The parameter's arrays on the other contexts, with the values of the first.

        A backward pass goes as far as there are gradients to write, and batch norm counts where it
        comes. So a parameter has a gradient on every context or on none: in the leaf where it is
        trained, of its own where only the script wants one, and none, nor a mark of one, where it is frozen.
        """
        first, parameter = self.array(name), self.parameters[name]
        trained = self.trained is None or name in self.trained  # before the first step nobody asks for a gradient
        form = first.shape, first.dtype, parameter.grad_req, trained
        known, others = self._spread.get(name, (None, []))
        if known == form:
            for other in others:
                classic(first).copyto(classic(other))
            return others
        others = [first.copyto(context) for context in self.contexts[1:]]
        if parameter.grad_req != "null" and not trained:
            for other in others:
                other.attach_grad(parameter.grad_req)
        self._spread[name] = form, others
        return others

    def unmark(self) -> None:
        """Gives every parameter its own array for gradients back."""
        own = [each for each in self.parameters.values() if each.grad_req != "null" and each._data is not None]
        first = self.contexts[0]
        if own:
            autograd.mark_variables(
                [each.data(first) for each in own], [each.grad(first) for each in own], [each.grad_req for each in own]
            )

    def share(self) -> None:
        """Copies the first context's values to those that the script itself has spread the block over."""
        for parameter in self.parameters.values():
            if len(parameter._data) > 1:
                first = parameter.data(self.contexts[0])
                for other in parameter.list_data():
                    if other is not first:
                        classic(first).copyto(classic(other))


def named(block: Any) -> dict[str, Any]:
    """The parameters by the names that `save_parameters` gives them; one that is used twice comes once."""
    result: dict[str, Any] = {}
    seen: set[int] = set()
    found = {**block._collect_params_with_prefix(), **{each.name: each for each in block.collect_params().values()}}
    for name, parameter in found.items():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result


def _numbered(contexts: Sequence[Any]) -> list[list[int | None]]:
    """Where a context's array lies, as gluon's parameters keep it: by kind of device and index."""
    numbers: list[list[int | None]] = [[], []]
    for index, context in enumerate(contexts):
        row = numbers[context.device_typeid & 1]
        row += [None] * (context.device_id + 1 - len(row))
        row[context.device_id] = index
    return numbers


def context_of(device: str) -> Any:
    """The context that a device's name stands for."""
    kind, _, index = device.partition(":")
    return mx.cpu(int(index or 0)) if kind == "cpu" else mx.gpu(int(index or 0))
