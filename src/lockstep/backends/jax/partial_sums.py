"""Partial sums on the devices: one for each shard of a step (leaves of the tree), and the sum over all shards.

`add` and `divide` compute with XLA even if the partial sums are in host memory, because numpy treats denormal numbers
differently.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from lockstep.core.layout import Layout
from lockstep.core.types import PartialSum


@dataclass(frozen=True)
class Leaves:
    """The partial sums of a step's single shards, by round: in a round every device computes at most one shard."""

    # rounds[index][row]: vectors on the device of the row, or None
    rounds: list[list[Any]] = field(default_factory=list)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # the (index, row) of each shard

    def get(self, shard: int) -> PartialSum:
        """Returns the vectors of one shard, on the device that computes them."""
        index, row = self.places[shard]
        leaf: PartialSum = self.rounds[index][row]
        return leaf


class DeviceSum(Mapping[str, "DeviceVector"]):
    """The sum over all shards, complete on every device.

    The update divides the gradient by `divisor`, because a division in the tree's executable could be fused with an
    addition. If the update with this sum was already started, `updated` is the state after it, for every device.
    """

    def __init__(
        self, layout: Layout, compute: Callable[[], Mapping[str, Any]], updated: list[Any] | None = None
    ) -> None:
        self.divisor = 1.0
        self.updated = updated
        self.layout = layout
        self._compute = compute

    @cached_property
    def vectors(self) -> Mapping[str, Any]:
        """The vector of each dtype, computed when it is first read."""
        return self._compute()

    def __getitem__(self, dtype: str) -> "DeviceVector":
        """Returns the vector of one dtype, which can be sliced without being computed."""
        return DeviceVector(self, dtype)

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of the dtypes."""
        return iter(self.layout.lengths)

    def __len__(self) -> int:
        """Returns the number of dtypes."""
        return len(self.layout.lengths)


@dataclass(frozen=True)
class DeviceVector:
    """The vector of one dtype of a `DeviceSum`, up to the element `stop`."""

    total: DeviceSum
    dtype: str
    stop: int | None = None

    def __getitem__(self, part: slice) -> "DeviceVector":
        """Returns the elements up to `part.stop` as a `DeviceVector`, without computing them."""
        assert part.start is None
        return DeviceVector(self.total, self.dtype, part.stop)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Waits for the elements and returns them in numpy, with the gradient divided by the divisor."""
        vector = self.total.vectors[self.dtype].addressable_data(0)
        values = np.array(vector, dtype)
        if self.total.divisor != 1.0:
            end = self.total.layout.divided.get(self.dtype, 0)  # the gradients come first; averages are not divided
            values[:end] = divide(values[:end], self.total.divisor, vector.device)
        return values[: self.stop]


def add(left: Any, right: Any, device: Any) -> Any:
    """Returns left + right: JAX arrays, added on their own device, or numpy arrays, added on `device`."""
    return _add(left, right) if isinstance(left, jax.Array) else _run(_add, left, right, device)


def divide(vector: Any, by: float, device: Any) -> Any:
    """Returns a numpy vector divided by a number, computed on `device`."""
    # A vector of divisors, because XLA would multiply by the reciprocal of a scalar, which rounds differently.
    return _run(_divide, vector, np.full_like(vector, by), device)


def _run(operation: Any, left: Any, right: Any, device: Any) -> Any:
    """Computes on `device` from copies of numpy arrays; returns numpy."""
    return np.asarray(operation(*jax.device_put((left, right), device, may_alias=False)))


_add = jax.jit(lambda left, right: left + right)
_divide = jax.jit(lambda left, right: left / right)
