"""The collectives, with which a script can write data parallelism itself, with the framework's own arrays.

    replicate(params, devices)   a copy of the parameters for every device
    split(batch, devices)        a piece of the batch for every device
    allreduce(arrays)            the same sum on every device

All devices belong to one process. The framework adds the arrays in the order of `core.tree`, which depends only on
their number. Without `shards=` that is the number of devices, so a loop gives the same bits in every run with the same
number of devices. With `shards=` it is the number of shards, so the bits do not depend on the number of devices: the
promise of a trainer, in a loop by hand.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, TypeVar, overload

from lockstep.backends import registry
from lockstep.backends.array_ops import ArrayOps, name_dtype
from lockstep.core import batches, plan, tree
from lockstep.core.run_state import Run
from lockstep.devices import resolve
from lockstep.errors import BatchError

Tree = TypeVar("Tree")

_NUMBERS = ("int", "uint", "float", "bfloat", "complex")  # the names of dtypes that can be added begin with these


class Pieces(list[Tree]):
    """A list with a piece of a batch for each device in order; `sizes` is the number of examples in each piece."""

    def __init__(self, pieces: Sequence[Tree], sizes: Sequence[int]) -> None:
        super().__init__(pieces)
        self.sizes = list(sizes)


def replicate(params: Tree, devices: Any) -> list[Tree]:
    """Returns a trainable copy of the parameters on each device, in the devices' order.

    `params` is an array, or a pytree (lists, tuples and dicts) of arrays of one framework. `devices` is a count, a list
    of names, or None for every accelerator, as in `wrap`. No copy shares memory with the original or another copy.

    A PyTorch copy requires a gradient if the original does; if none of the originals does, and none is an
    `nn.Parameter`, all floating-point copies do. TensorFlow's copies are variables; MXNet's have a gradient attached;
    JAX's are committed to their device.

    >>> import numpy as np
    >>> first, second = replicate({"weight": np.ones((1, 2)), "bias": np.zeros(1)}, devices=2)
    >>> first["weight"] += 1
    >>> first["weight"].tolist(), second["weight"].tolist()
    ([[2.0, 2.0]], [[1.0, 1.0]])
    """
    arrays = list(_iterate_values(params))
    home, backend = _find_framework("replicate", arrays)
    arrays = list({id(array): array for array in arrays}.values())  # an array at two places is one on each device too

    def copy_to(device: str) -> Tree:
        copies = dict(zip(map(id, arrays), backend.copy(arrays, device), strict=True))
        copied: Tree = _map_values(params, lambda array: copies[id(array)])
        return copied

    return [copy_to(device) for device in _resolve_devices(home, devices)]


@overload
def split(batch: Tree, devices: Any, shards: None = None) -> Pieces[Tree]: ...
@overload
def split(batch: Tree, devices: Any, shards: int) -> Pieces[list[Tree]]: ...
def split(batch: Tree, devices: Any, shards: int | None = None) -> Pieces[Any]:
    """Returns a piece of the batch on each device; `.sizes` has the number of examples in each piece.

    `batch` is an array, or tuples and dicts of arrays of one framework, with one entry per example. Lists are cut as
    lists; scalars, strings and copies of arrays without axes go to every piece. Sizes differ by at most one, larger
    ones first; if there are more devices than examples, the last pieces have length 0. Every piece is contiguous, in
    memory of its own.

    With `shards=8` a piece is a list: the batch is cut into 8 shards, and each device gets adjacent ones, as in a
    trainer. The shards do not depend on the number of devices.

    >>> import numpy as np
    >>> pieces = split((np.arange(10).reshape(5, 2), np.arange(5)), devices=["cpu", "cpu"])
    >>> pieces.sizes
    [3, 2]
    >>> for x, y in pieces:
    ...     print(x.tolist(), y.tolist())
    [[0, 1], [2, 3], [4, 5]] [0, 1, 2]
    [[6, 7], [8, 9]] [3, 4]
    >>> [[shard.tolist() for shard in piece] for piece in split(np.arange(5), devices=2, shards=4)]
    [[[0, 1], [2]], [[3], [4]]]
    """
    top = batches.restore_tuples(batch)
    num_examples = batches.count(top)
    home, backend = _find_framework("split", [value for value in batches.leaves(top) if batches.is_array(value)])
    names = _resolve_devices(home, devices)

    def cut_piece(device: str, start: int, stop: int) -> Any:
        def leaf(value: Any) -> Any:
            if isinstance(value, list):
                return value[start:stop]
            if isinstance(value, Number) or registry.find_array_backend(value) != home:
                return value
            return backend.cut(value, slice(start, stop) if batches.is_array(value) else ..., device)

        return batches.transform(top, leaf)

    num_shards = Run(0, shards).shards or len(names)  # raises for invalid numbers
    owners = plan.Plan.even(num_shards, range(len(names))).owners
    pieces: list[list[Any]] = [[] for _ in names]
    sizes = [0] * len(names)
    for owner, (start, stop) in zip(owners, plan.bounds(num_examples, num_shards), strict=True):
        pieces[owner].append(cut_piece(names[owner], start, stop))
        sizes[owner] += stop - start
    return Pieces([piece for (piece,) in pieces] if shards is None else pieces, sizes)


@overload
def allreduce(arrays: Sequence[Tree], shards: None = None) -> list[Tree]: ...
@overload
def allreduce(arrays: Sequence[Sequence[Tree]], shards: int) -> list[Tree]: ...
def allreduce(arrays: Sequence[Any], shards: int | None = None) -> list[Any]:
    """Returns the sum of the arrays, one from each device, on every device.

    Each entry of `arrays` is an array, or a pytree (lists, tuples and dicts) of arrays with the same structure for
    every device. The sum is written to the entries in place; JAX's arrays and TensorFlow's tensors cannot be written
    to, so use what is returned. The additions have one fixed order, ((a + b) + (c + d)) + …, and the arrays' own type.
    None, the gradient of an unused parameter, is returned as None.

    With `shards=8` each entry is a list with one array or pytree for each of the device's shards, as `split` gave them,
    8 in total. The order of the additions then depends on the shards alone, so the sum has the same bits on any number
    of devices. It is written to each device's first shard.

    >>> import numpy as np
    >>> a, b = np.array([[1, 1]]), np.array([[2, 2]])
    >>> sums = allreduce([a, b])
    >>> a.tolist(), b.tolist()
    ([[3, 3]], [[3, 3]])
    >>> shards = [np.array([value]) for value in (0.1, 0.2, 0.3, 0.4)]
    >>> allreduce([[shards[0], shards[1]], [shards[2], shards[3]]], shards=4)
    [array([1.]), array([1.])]
    """
    if not isinstance(arrays, list | tuple) or not arrays:
        raise BatchError(
            f"allreduce needs a list with an array, or a pytree of arrays, from each device. Got {_describe(arrays)}. "
            "Give [array_of_device_0, array_of_device_1, …]."
        )
    counts = [1] * len(arrays) if shards is None else _count_shards(arrays, shards)
    trees = arrays if shards is None else [each for device in arrays for each in device]
    firsts = [sum(counts[:index]) for index in range(len(counts))]  # the position of each device's first shard
    columns = list(_align(trees))  # for every position in the pytree, one array from each device, or from each shard
    if columns and all(value is None for column in columns for value in column):
        return [trees[first] for first in firsts]
    _, backend = _find_framework("allreduce", [value for column in columns for value in column if value is not None])
    for column in columns:
        _check(column, backend)
        if shards is not None and len({id(array) for array in column if array is not None}) not in (0, len(column)):
            raise BatchError(
                "allreduce needs a separate array for each shard. Got one array for two shards, which contains the "
                "gradient of the last shard, or of both. Copy each shard's gradient before the next one is computed."
            )
    # All sums are computed before the first is written, because one array may be a view of another.
    totals = [None if column[0] is None else tree.fold(column, backend.add) for column in columns]
    targets = [[column[first] for first in firsts] for column in columns]
    written = [_write_sum(total, column, backend) for total, column in zip(totals, targets, strict=True)]
    return [_map_values(trees[0], _replace_in_order(values)) for values in zip(*written, strict=True)]


def _count_shards(arrays: Sequence[Any], shards: int) -> list[int]:
    """Returns the number of shards of each device; raises BatchError if one is 0, or their sum is not `shards`."""
    counts = [len(each) if isinstance(each, list | tuple) else 0 for each in arrays]
    if 0 in counts or sum(counts) != shards:
        raise BatchError(
            f"allreduce(…, shards={shards!r}) needs a list with one entry per shard from each device, {shards!r} in "
            f"total. Got {counts} from {len(counts)} devices. Give one gradient for each shard of "
            f"split(batch, devices, shards={shards!r})."
        )
    return counts


def _write_sum(total: Any, column: Sequence[Any], backend: ArrayOps) -> Sequence[Any]:
    """Writes the sum into every array of a column, and returns the arrays that contain the sum."""
    return column if total is None else [backend.write(total, target) for target in column]


def _align(trees: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yields, for each position in the pytrees, the values of all devices at this position."""
    forms = [_get_structure(each) for each in trees]
    for index, form in enumerate(forms):
        if form != forms[0]:
            raise BatchError(
                f"allreduce needs pytrees of the same structure from all devices. Got {_describe(trees[0])} from "
                f"device 0 and {_describe(trees[index])} from device {index}. Give every device a pytree with the same "
                "structure."
            )
    if forms[0] is None:
        yield trees
    else:
        for key in trees[0] if isinstance(trees[0], Mapping) else range(len(trees[0])):
            yield from _align([each[key] for each in trees])


def _get_structure(tree: Any) -> Any:
    """Returns the keys of a dict, or the type and the length of a list or tuple; None for a single value."""
    if isinstance(tree, Mapping):
        return set(tree)
    return (type(tree), len(tree)) if isinstance(tree, list | tuple) else None


def _check(column: Sequence[Any], backend: ArrayOps) -> None:
    """Raises if the shapes or dtypes of the arrays differ, or if one of the arrays cannot be written."""
    forms = [None if array is None else (tuple(array.shape), name_dtype(array)) for array in column]
    for index, form in enumerate(forms):
        if form != forms[0]:
            raise BatchError(
                f"allreduce adds arrays of the same shape and dtype. Got {_describe_form(forms[0])} from device 0 and "
                f"{_describe_form(form)} from device {index}. Give every device an array of the same shape and dtype."
            )
    if forms[0] is not None and not forms[0][1].startswith(_NUMBERS):
        raise BatchError(
            f"allreduce adds only numbers. Got arrays of {forms[0][1]}. Convert the arrays to a numeric dtype."
        )
    for array in column:
        if array is not None and (why := backend.check(array)):
            raise BatchError(f"allreduce cannot write the sum into one of the arrays. Got {why}.")


def _find_framework(caller: str, values: Sequence[Any]) -> tuple[str, ArrayOps]:
    """Returns the framework of these arrays and its array functions; raises BatchError unless it is one framework."""
    homes = {registry.find_array_backend(value): value for value in values}
    if None in homes or not homes:
        got = f"a {_describe_type(homes[None])}" if homes else "none"
        raise BatchError(
            f"{caller} needs arrays of numpy, PyTorch, JAX, TensorFlow or MXNet. Got {got}. Give an array, or lists, "
            "tuples and dicts of arrays."
        )
    if len(homes) > 1:
        kinds = " and ".join(sorted(str(home).rpartition(".")[2] for home in homes))
        raise BatchError(f"{caller} needs arrays of one framework. Got {kinds}. Convert all arrays to one framework.")
    (home,) = homes
    assert home is not None
    backend = registry.load_array_ops(home)
    for value in values:
        if why := backend.absent(value):
            raise BatchError(f"{caller} needs arrays with values. Got {why}.")
    return home, backend


def _resolve_devices(home: str, devices: Any) -> tuple[str, ...]:
    module = registry.load_module(home)
    return resolve(devices, module.available(), module.name)


def _map_values(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns a copy of the pytree with `leaf` applied to every value; unlike in a batch, lists are containers too."""

    def entry(value: Any) -> Any:
        return [_map_values(each, leaf) for each in value] if isinstance(value, list) else leaf(value)

    return batches.transform(tree, entry)


def _iterate_values(tree: Any) -> Iterator[Any]:
    """Yields every value of the pytree in order, including the values in lists."""
    for value in batches.leaves(tree):
        if isinstance(value, list):
            yield from _iterate_values(tuple(value))
        else:
            yield value


def _replace_in_order(values: Sequence[Any]) -> Callable[[Any], Any]:
    """Returns a function for `_map_values` that replaces a pytree's leaves, in order, with the given `values`."""
    left = iter(values)
    return lambda value: next(left)


def _describe(tree: Any) -> str:
    """Returns the structure and the shapes of a pytree as text, for error messages."""
    if isinstance(tree, list):
        return "[" + ", ".join(map(_describe, tree)) + "]"
    return batches.describe(tree)


def _describe_form(form: tuple[tuple[int, ...], str] | None) -> str:
    return "None" if form is None else f"{form[0]} of {form[1]}"


def _describe_type(value: Any) -> str:
    """Returns the name of a value's type with its package, such as `float` or `keras.Variable`."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
