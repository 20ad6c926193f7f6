"""The collectives: data parallelism by hand, with the framework's own arrays on one process's devices.

    replicate(params, devices)   a copy of the parameters for every device
    split(batch, devices)        a piece of the batch for every device
    allreduce(arrays)            the same sum on every device

The sum is added in the order of `core.tree`, which follows from the number of
devices alone, by the framework's own addition. So a training loop made of these
repeats itself bit for bit; unlike a trainer's shards, another number of devices
is another order and gives other bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, TypeVar

from lockstep.backends import registry
from lockstep.backends.array_ops import ArrayOps, name_dtype
from lockstep.core import batches, plan, tree
from lockstep.devices import resolve
from lockstep.errors import BatchError

Nest = TypeVar("Nest")

_NUMBERS = ("int", "uint", "float", "bfloat", "complex")  # how the types begin that can be added


class Pieces(list[Nest]):
    """A piece of a batch for each device, in order, and in `sizes` the number of examples in each."""

    def __init__(self, pieces: Sequence[Nest], sizes: Sequence[int]) -> None:
        super().__init__(pieces)
        self.sizes = list(sizes)


def replicate(params: Nest, devices: Any) -> list[Nest]:
    """A trainable copy of the parameters on each device, in the devices' order.

    `params` is an array, or a nest of lists, tuples and dicts of arrays of one
    framework. `devices` is a count, a list of names, or None for every
    accelerator, as in `wrap`. No copy shares memory with the original or another.

    A PyTorch tensor needs a gradient where the original does; TensorFlow's copies
    are variables; MXNet's have their gradient attached; JAX's stay on their device.

    >>> import numpy as np
    >>> first, second = replicate({"weight": np.ones((1, 2)), "bias": np.zeros(1)}, devices=2)
    >>> first["weight"] += 1
    >>> first["weight"].tolist(), second["weight"].tolist()
    ([[2.0, 2.0]], [[1.0, 1.0]])
    """
    home, backend = _home("replicate", list(_values(params)))

    def replica(device: str) -> Nest:
        copies: dict[int, Any] = {}  # an array that stands at two places is one array on every device too

        def copy(array: Any) -> Any:
            if id(array) not in copies:
                copies[id(array)] = backend.copy(array, device)
            return copies[id(array)]

        nest: Nest = _transformed(params, copy)
        return nest

    return [replica(device) for device in _named(home, devices)]


def split(batch: Nest, devices: Any) -> Pieces[Nest]:
    """A piece of the batch on each device; `.sizes` says how many examples each piece has.

    `batch` is an array or a nest of tuples and dicts of arrays of one framework,
    with one entry per example. Lists are cut as lists; numbers, words and copies of
    arrays without axes go to every piece. Sizes differ by at most one, larger ones first; where there are
    more devices than examples, the last pieces have length 0. Every piece is
    contiguous, in memory of its own.

    >>> import numpy as np
    >>> pieces = split((np.arange(10).reshape(5, 2), np.arange(5)), devices=["cpu", "cpu"])
    >>> pieces.sizes
    [3, 2]
    >>> for x, y in pieces:
    ...     print(x.tolist(), y.tolist())
    [[0, 1], [2, 3], [4, 5]] [0, 1, 2]
    [[6, 7], [8, 9]] [3, 4]
    """
    whole = batches.top(batch)
    num_examples = batches.count(whole)
    home, backend = _home("split", [value for value in batches.leaves(whole) if batches.is_array(value)])
    names = _named(home, devices)

    def piece(device: str, start: int, stop: int) -> Any:
        def leaf(value: Any) -> Any:
            if isinstance(value, list):
                return value[start:stop]
            if isinstance(value, Number) or registry.home_of(value) != home:
                return value
            return backend.cut(value, slice(start, stop) if batches.is_array(value) else ..., device)

        return batches.transform(whole, leaf)

    places = zip(names, plan.bounds(num_examples, len(names)), strict=True)
    return Pieces([piece(device, *place) for device, place in places], plan.sizes(num_examples, len(names)))


def allreduce(arrays: Sequence[Nest]) -> list[Nest]:
    """The sum of the arrays, one from each device, on every device.

    Each entry of `arrays` is an array, or a nest of lists, tuples and dicts of
    them, the same for every device. Entries stay on their devices and receive the
    sum in place; JAX's arrays and TensorFlow's tensors cannot be written to, so
    use what is returned. The additions have one fixed order, ((a + b) + (c + d)) + …,
    and the arrays' own type. None, the gradient of an unused parameter, stays None.

    >>> import numpy as np
    >>> a, b = np.array([[1, 1]]), np.array([[2, 2]])
    >>> sums = allreduce([a, b])
    >>> a.tolist(), b.tolist()
    ([[3, 3]], [[3, 3]])
    """
    if not isinstance(arrays, list | tuple) or not arrays:
        raise BatchError(
            f"allreduce takes a list with an array, or a nest of arrays, from each device. Got {_told(arrays)}. "
            "Give [array_of_the_first_device, array_of_the_second, …]."
        )
    columns = list(_abreast(arrays))  # for every place in the nest, one array from each device
    if columns and all(value is None for column in columns for value in column):
        return list(arrays)
    _, backend = _home("allreduce", [value for column in columns for value in column if value is not None])
    for column in columns:
        _check(column, backend)
    # Every sum is there before the first is written: one array may stand at two places, or be a view of another.
    totals = [None if column[0] is None else tree.fold(column, backend.add) for column in columns]
    written = [_written(total, column, backend) for total, column in zip(totals, columns, strict=True)]
    return [_transformed(arrays[0], _following(values)) for values in zip(*written, strict=True)]


def _written(total: Any, column: Sequence[Any], backend: ArrayOps) -> Sequence[Any]:
    """The sum, in every array's place."""
    return column if total is None else [backend.write(total, target) for target in column]


def _abreast(nests: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The values that stand at the same place in every nest, place by place."""
    forms = [_keys(nest) for nest in nests]
    for index, form in enumerate(forms):
        if form != forms[0]:
            raise BatchError(
                f"allreduce takes the same nest of arrays from every device. Got {_told(nests[0])} from device 0 and "
                f"{_told(nests[index])} from device {index}. Give equal nests."
            )
    if forms[0] is None:
        yield nests
    else:
        for key in nests[0] if isinstance(nests[0], Mapping) else range(len(nests[0])):
            yield from _abreast([nest[key] for nest in nests])


def _keys(nest: Any) -> Any:
    """What two nests must have in common to be alike on their first level; None for what is no nest."""
    if isinstance(nest, Mapping):
        return set(nest)
    return (type(nest), len(nest)) if isinstance(nest, list | tuple) else None


def _check(column: Sequence[Any], backend: ArrayOps) -> None:
    """Refuses arrays that cannot be added as they are."""
    forms = [None if array is None else (tuple(array.shape), name_dtype(array)) for array in column]
    for index, form in enumerate(forms):
        if form != forms[0]:
            raise BatchError(
                f"allreduce adds arrays of one shape and type. Got {_form(forms[0])} from device 0 and {_form(form)} "
                f"from device {index}. Give equal arrays."
            )
    if forms[0] is not None and not forms[0][1].startswith(_NUMBERS):
        raise BatchError(f"allreduce adds numbers. Got arrays of {forms[0][1]}. Convert them to a type of numbers.")
    for array in column:
        if array is not None and (why := backend.check(array)):
            raise BatchError(f"allreduce writes the sum in its parts' place. Got {why}.")


def _home(caller: str, values: Sequence[Any]) -> tuple[str, ArrayOps]:
    """The one framework of all these arrays, each of which has a value."""
    homes = {registry.home_of(value): value for value in values}
    if None in homes or not homes:
        got = f"a {_kind(homes[None])}" if homes else "none"
        raise BatchError(
            f"{caller} takes arrays of numpy, PyTorch, JAX, TensorFlow or MXNet. Got {got}. "
            "Give an array, or lists, tuples and dicts of them."
        )
    if len(homes) > 1:
        kinds = " and ".join(sorted(str(home).rpartition(".")[2] for home in homes))
        raise BatchError(f"{caller} takes arrays of one framework. Got {kinds}. Convert them to one.")
    (home,) = homes
    assert home is not None
    backend = registry.arrays(home)
    for value in values:
        if why := backend.absent(value):
            raise BatchError(f"{caller} takes arrays with values. Got {why}.")
    return home, backend


def _named(home: str, devices: Any) -> tuple[str, ...]:
    module = registry.module(home)
    return resolve(devices, module.available(), module.name)


def _transformed(nest: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same nest with `leaf` of every value; unlike a batch's, its lists are nests too."""

    def entry(value: Any) -> Any:
        return [_transformed(each, leaf) for each in value] if isinstance(value, list) else leaf(value)

    return batches.transform(nest, entry)


def _values(nest: Any) -> Iterator[Any]:
    """Every value of the nest, in order."""
    for value in batches.leaves(nest):
        if isinstance(value, list):
            yield from _values(tuple(value))
        else:
            yield value


def _following(values: Sequence[Any]) -> Callable[[Any], Any]:
    """What puts one value after the other in the places of a nest."""
    left = iter(values)
    return lambda place: next(left)


def _told(nest: Any) -> str:
    """A nest in a few words, for errors."""
    if isinstance(nest, list):
        return "[" + ", ".join(map(_told, nest)) + "]"
    return batches.describe(nest)


def _form(form: tuple[tuple[int, ...], str] | None) -> str:
    return "None" if form is None else f"{form[0]} of {form[1]}"


def _kind(value: Any) -> str:
    """Where a value comes from: `float`, `keras.Variable`."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
