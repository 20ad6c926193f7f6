"""The array operations that each framework brings: all that `lockstep.collectives` and `lockstep.EMA` ask of it.

The order of additions, the nests and the checks are written once, in
`lockstep.collectives`. A framework copies, adds and writes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray


class ArrayOps(Protocol):
    """What a backend's module `array_ops` offers: one framework's arrays on this process's devices."""

    def copy(self, array: Any, device: str) -> Any:
        """A contiguous copy on the device, in memory of its own, that can be trained where the original can."""

    def cut(self, array: Any, where: Any, device: str) -> Any:
        """The examples that the slice says (`...`: all there is), in contiguous memory of their own on the device."""

    def absent(self, array: Any) -> str:
        """Why this array has no value here and now; empty where it has one."""

    def check(self, array: Any) -> str:
        """Why a sum cannot take the place of this array's value; empty where it can."""

    def add(self, left: Any, right: Any) -> Any:
        """left + right where left lies, in memory of its own."""

    def write(self, value: Any, target: Any) -> Any:
        """The value in the target's place; where the framework writes to no array, a copy where the target lies."""

    # -- for the averages of `lockstep.EMA`

    def widen(self, array: Any) -> Any:
        """A copy on the device of the array, in float32 or wider if it is a floating type."""

    def update_averages(self, averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
        """`decay * average + (1 - decay) * value` for each pair, in place if the framework can write to an array.

        Both products and the sum are rounded one by one, in the type of the average: a fused multiply-add would give
        other bits.
        """

    def to_numpy(self, array: Any) -> NDArray[Any]:
        """A copy as numpy."""

    def from_numpy(self, data: NDArray[Any], like: Any) -> Any:
        """A copy of a numpy array on the device of `like`."""


def name_dtype(array: Any) -> str:
    """The name of the type of an array of any framework.

    >>> import numpy
    >>> name_dtype(numpy.ones(2, "float16"))
    'float16'
    """
    dtype = array.dtype  # a string, a class, or an object with a name
    return str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).rpartition(".")[2].rstrip("_")
