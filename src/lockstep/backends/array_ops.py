"""The array functions that each framework brings: all that the collectives, losses and metrics need of it.

The order of additions, what a shard's loss weighs, the named metrics and every check are
written once, over these functions. A framework copies, casts, adds and compares.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class ArrayOps(Protocol):
    """What a backend's module `array_ops` offers: one framework's arrays on this process's devices."""

    # -- for the collectives

    def copy(self, array: Any, device: str) -> Any:
        """A contiguous copy on the device, in memory of its own, that can be trained if the original can."""

    def cut(self, array: Any, where: Any, device: str) -> Any:
        """Copy the examples of a slice (`...`: all of them) into contiguous memory on the device."""

    def absent(self, array: Any) -> str:
        """Why this array has no value now; empty if it has one."""

    def check(self, array: Any) -> str:
        """Why a sum cannot take the place of this array's value; empty if it can."""

    def add(self, left: Any, right: Any) -> Any:
        """left + right on the left array's device, in memory of its own."""

    def write(self, value: Any, target: Any) -> Any:
        """Write the value into the target; a copy on the target's device if the framework writes to no array."""

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

    # -- for losses and metrics. They also run inside jax.jit and tf.function, so none but `to_host` reads a value.

    def is_array(self, value: Any) -> bool:
        """Whether this is one of the framework's arrays."""

    def as_array(self, value: Any) -> Any:
        """A number or a list of numbers as an array; an array as it is."""

    def to_host(self, array: Any) -> NDArray[np.generic] | None:
        """The elements in numpy; None while the framework traces, because there are none yet."""

    def shape(self, array: Any) -> tuple[int, ...]:
        """The lengths of its axes; none for one number."""

    def reshape(self, array: Any, shape: tuple[int, ...]) -> Any:
        """The same elements in another shape."""

    def double(self, array: Any) -> Any:
        """The array in the type in which sums are made (float64 if the framework has it), cut off from gradients."""

    def cast_like(self, value: Any, array: Any) -> Any:
        """An array or a number in the type, and on the device, of `array`."""

    def average(self, array: Any) -> Any:
        """The mean of all elements, in the array's own type."""

    def average_rows(self, array: Any, examples: int) -> Any:
        """The mean of every example's elements: a vector."""

    def total(self, array: Any) -> Any:
        """The sum of all elements, in the array's own type."""

    def scale(self, array: Any, factor: Any) -> Any:
        """array * factor, in the array's type."""

    def divide(self, array: Any, by: Any) -> Any:
        """array / by; what it gives if `by` is 0 is not used."""

    def as_weight(self, value: Any) -> Any:
        """A number by which a sum is divided, so that it can be compared with 0."""

    def as_column(self, weights: Any, values: Any) -> Any:
        """One weight per example, shaped (examples, 1, ...) as `values` are, for what these are divided by."""

    def where(self, condition: Any, array: Any, other: Any) -> Any:
        """`array` if the condition holds, else `other`, element by element."""

    def any_nonzero(self, array: Any) -> Any:
        """Whether an element is not 0."""

    def is_finite_nonzero(self, value: Any) -> Any:
        """Whether one number is finite and not 0."""

    def is_short(self, array: Any) -> bool:
        """Whether the array's type is shorter than the one in which gradients are added, so that it rounds shares."""

    def argmax(self, array: Any, axis: int) -> Any:
        """The position of the largest element on an axis."""

    def has_in_top(self, array: Any, labels: Any, num: int, axis: int) -> Any:
        """Whether the label is among the positions of the `num` largest elements on the axis."""

    def equal(self, left: Any, right: Any) -> Any:
        """Whether elements are equal as numbers, whatever their types."""

    def count_true(self, array: Any) -> Any:
        """The number of elements that are true."""


def name_dtype(array: Any) -> str:
    """The name of the type of an array of any framework.

    >>> import numpy
    >>> name_dtype(numpy.ones(2, "float16"))
    'float16'
    """
    dtype = array.dtype  # a string, a class, or an object with a name
    return str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).rpartition(".")[2].rstrip("_")
