"""Objects that are sent to a worker, their arrays through shared memory.

The arrays of a batch are written once into a region and read where they lie; only
the small rest goes through the channel. Both ends are our own processes.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from lockstep.errors import BatchError
from lockstep.exchange.region import Region

_ALIGNMENT = 64


def pack(values: Sequence[Any], region: Region) -> list[bytes]:
    """One message per value, with the arrays of all of them laid out one after another in the region."""
    messages = []
    buffers: list[list[pickle.PickleBuffer]] = []
    for value in values:
        taken: list[pickle.PickleBuffer] = []
        messages.append(_dumps(value, taken))
        buffers.append(taken)
    raws = [[buffer.raw() for buffer in taken] for taken in buffers]
    memory = region.view(sum(raw.nbytes + _ALIGNMENT for group in raws for raw in group))
    start = 0
    result = []
    for message, group in zip(messages, raws, strict=True):
        places = []
        for raw in group:
            memory[start : start + raw.nbytes] = raw
            places.append((start, raw.nbytes))
            start += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
        result.append(pickle.dumps((message, places)))
    return result


def _dumps(value: Any, taken: list[pickle.PickleBuffer]) -> bytes:
    """The value's pickle; cloudpickle brings the classes that the script itself defines."""
    try:
        data: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=taken.append)
    except Exception as error:
        raise BatchError(
            f"What a worker computes on travels there by pickle. Something in the batch does not: {error}. "
            "Give arrays, numbers, strings and lists of these; or use devices=1."
        ) from error
    return data


def unpack(message: bytes, region: Region) -> Any:
    """The value; its arrays are read-only views of the region, good until the next parcel."""
    return _loads(message, lambda nbytes: region.view(nbytes).toreadonly())


def keep(message: bytes, region: Region) -> Any:
    """The value, for good: its arrays may be written to, which nobody else sees; pages that are not stay shared."""
    return _loads(message, region.own)


def _loads(message: bytes, view: Callable[[int], memoryview]) -> Any:
    body, places = pickle.loads(message)
    if not places:
        return pickle.loads(body)
    memory = view(max(start + size for start, size in places))
    return pickle.loads(body, buffers=[memory[start : start + size] for start, size in places])
