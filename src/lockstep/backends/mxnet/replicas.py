"""The script's block, and copies of its parameters on every context while Lockstep computes.

The block itself is on the first context. Its parameters are copied to the other contexts just before each command. So
every replica starts from what the script has written, however it did so, and between the steps the script has an
ordinary block to save or to run.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import mxnet as mx
from mxnet import autograd

from lockstep.backends.mxnet.arrays import as_nd, choose_sum_dtype, get_dtype
from lockstep.backends.mxnet.unsupported import check_parameters
from lockstep.errors import ModelError


class Replicas:
    """A block and its replicas on the contexts; several replicas may be on one context."""

    def __init__(self, block: Any, devices: Sequence[str]) -> None:
        self.block = block
        self.parameters = name_parameters(block)
        self.trained: Collection[str] | None = None  # parameters whose gradients are summed; None before a step
        check_parameters(self.parameters)
        self.move(devices)

    def move(self, devices: Sequence[str]) -> None:
        """Moves the replicas to these devices, and the block itself to the first device."""
        self._devices = [parse_context(device) for device in devices]
        self.contexts = list(dict.fromkeys(self._devices))
        self._copies: dict[
            str, tuple[Any, list[Any]]
        ] = {}  # each parameter's form, and its arrays on the other contexts
        for parameter in self.parameters.values():
            self._move_parameter(parameter)

    def _move_parameter(self, parameter: Any) -> None:
        """Moves a parameter to the first context, unless it has an array there already."""
        first = self.contexts[0]
        if first in parameter.list_ctx():
            return
        if parameter._data is None:
            parameter.reset_ctx(first)
        else:
            with autograd.pause():
                parameter._init_impl(parameter.list_data()[0], [first])

    def find_context_index(self, replica: int) -> int:
        """Returns the index of a replica's context."""
        return self.contexts.index(self._devices[replica % len(self._devices)])

    def interleave(self, pieces: Mapping[int, Mapping[int, Any]]) -> Iterator[tuple[int, int, Any]]:
        """Yields (index of the context, shard, piece): the first shard of every replica, then the second, ..."""
        queues = [
            [(self.find_context_index(replica), *each) for each in shards.items()] for replica, shards in pieces.items()
        ]
        for turn in zip_longest(*queues):
            yield from (each for each in turn if each is not None)

    @property
    def uninitialized(self) -> list[str]:
        """The names of the parameters whose shape is not known before the first batch."""
        return [name for name, parameter in self.parameters.items() if parameter._data is None]

    def check_initialized(self) -> None:
        """Raises ModelError if a parameter has no shape yet."""
        if self.uninitialized:
            raise ModelError(
                f"Parameter {self.uninitialized[0]!r} gets its shape from the first batch, so it has no value yet. "
                "Make a step first, or give the shape: in_units=..., in_channels=..."
            )

    def get_array(self, name: str) -> Any:
        """Returns a parameter's array on the first context."""
        return self.parameters[name].data(self.contexts[0])

    def describe_field(self, name: str) -> tuple[str, str, tuple[int, ...]]:
        """Returns a parameter's name, the dtype in which its gradients are added, and its shape."""
        array = self.get_array(name)
        return name, choose_sum_dtype(get_dtype(array)), tuple(array.shape)

    def is_double(self) -> bool:
        """Returns whether any parameter is float64."""
        return any(get_dtype(parameter) == "float64" for parameter in self.parameters.values())

    @contextmanager
    def spread(self) -> Iterator[dict[str, list[Any]]]:
        """Lets the block be called on every context; yields each parameter's arrays, in the order of the contexts."""
        copies = {name: [self.get_array(name), *self._copy_to_others(name)] for name in self.parameters}
        before = [(each, each._data, each._ctx_list, each._ctx_map) for each in self.parameters.values()]
        indices = _index_contexts(self.contexts)
        try:
            for name, parameter in self.parameters.items():
                parameter._data, parameter._ctx_list, parameter._ctx_map = copies[name], self.contexts, indices
            yield copies
        finally:
            for parameter, *own in before:
                parameter._data, parameter._ctx_list, parameter._ctx_map = own

    def _copy_to_others(self, name: str) -> list[Any]:
        """Copies a parameter from the first context to the other contexts, and returns its arrays there.

        A backward pass runs as far as there are gradients to write, and batch norm updates its statistics in the
        backward pass. So a parameter must have a gradient on every context or on none. The gradient is in the partial
        sum if the parameter is trained, and in an array of its own if only the script asks for a gradient. A frozen
        parameter has no gradient.
        """
        first, parameter = self.get_array(name), self.parameters[name]
        trained = self.trained is None or name in self.trained  # before the first step no gradient is read at all
        form = first.shape, first.dtype, parameter.grad_req, trained
        last_form, others = self._copies.get(name, (None, []))
        if last_form == form:
            for other in others:
                as_nd(first).copyto(as_nd(other))
            return others
        others = [first.copyto(context) for context in self.contexts[1:]]
        if parameter.grad_req != "null" and not trained:
            for other in others:
                other.attach_grad(parameter.grad_req)
        self._copies[name] = form, others
        return others

    def restore_gradients(self) -> None:
        """Makes autograd write gradients to the parameters' own gradient arrays again."""
        own = [each for each in self.parameters.values() if each.grad_req != "null" and each._data is not None]
        first = self.contexts[0]
        if own:
            autograd.mark_variables(
                [each.data(first) for each in own], [each.grad(first) for each in own], [each.grad_req for each in own]
            )

    def copy_to_script_contexts(self) -> None:
        """Copies the first context's values to other contexts on which the script itself has put the block."""
        for parameter in self.parameters.values():
            if len(parameter._data) > 1:
                first = parameter.data(self.contexts[0])
                for other in parameter.list_data():
                    if other is not first:
                        as_nd(first).copyto(as_nd(other))


def name_parameters(block: Any) -> dict[str, Any]:
    """Returns the parameters by the names that `save_parameters` uses; a shared parameter is listed once."""
    result: dict[str, Any] = {}
    seen: set[int] = set()
    named = {**block._collect_params_with_prefix(), **{each.name: each for each in block.collect_params().values()}}
    for name, parameter in named.items():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result


def _index_contexts(contexts: Sequence[Any]) -> list[list[int | None]]:
    """Returns each context's position in gluon's own format: a list for CPUs and a list for GPUs, by device index."""
    positions: list[list[int | None]] = [[], []]
    for index, context in enumerate(contexts):
        row = positions[context.device_typeid & 1]
        row += [None] * (context.device_id + 1 - len(row))
        row[context.device_id] = index
    return positions


def parse_context(device: str) -> Any:
    """Returns the MXNet context for a device's name, e.g. `gpu:1`."""
    kind, _, index = device.partition(":")
    return mx.cpu(int(index or 0)) if kind == "cpu" else mx.gpu(int(index or 0))
