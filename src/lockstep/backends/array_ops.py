"""The protocol of the array functions that each backend brings for the collectives, losses and metrics.

The order of additions, the weight of a shard's loss, the named metrics and the checks are written once, with these
functions.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class ArrayOps(Protocol):
    """The functions of a backend's module `array_ops`, for its framework's arrays on this process's devices."""

    # -- for the collectives

    def copy(self, arrays: Sequence[Any], device: str) -> list[Any]:
        """Returns contiguous copies on the device. A copy can be trained if its original can, or if no original can."""

    def cut(self, array: Any, where: Any, device: str) -> Any:
        """Returns a contiguous copy, on the device, of the examples of a slice; `...` means all examples."""

    def absent(self, array: Any) -> str:
        """Returns why this array has no value; an empty string if it has a value."""

    def check(self, array: Any) -> str:
        """Returns why a sum cannot replace this array's value; an empty string if it can."""

    def add(self, left: Any, right: Any) -> Any:
        """Returns left + right on the left array's device, in new memory."""

    def write(self, value: Any, target: Any) -> Any:
        """Writes the value to the target and returns the target; for immutable arrays, returns a copy of the value."""

    # -- for the averages of `lockstep.EMA`

    def widen(self, array: Any) -> Any:
        """Returns a copy on the array's device; floats shorter than float32 become float32."""

    def update_averages(self, averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
        """Returns `decay * average + (1 - decay) * value` for each pair, computed in place if possible.

        Both products and the sum are rounded one by one, in the type of the average, because a fused multiply-add
        would give other bits.
        """

    def to_numpy(self, array: Any) -> NDArray[Any]:
        """Returns a numpy copy of the array."""

    def from_numpy(self, data: NDArray[Any], like: Any) -> Any:
        """Returns a copy of a numpy array on the device of `like`."""

    # -- for losses and metrics. They also run inside jax.jit and tf.function, so none but `to_host` reads a value.

    def is_array(self, value: Any) -> bool:
        """Returns whether this is one of the framework's arrays."""

    def as_array(self, value: Any) -> Any:
        """Returns a number or a list of numbers as an array, and an array as it is."""

    def to_host(self, array: Any) -> NDArray[np.generic] | None:
        """Returns the elements in numpy; None while the framework traces a function, when they have no values."""

    def shape(self, array: Any) -> tuple[int, ...]:
        """Returns the array's shape; () for a scalar."""

    def reshape(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Returns the array's elements in another shape."""

    def double(self, array: Any) -> Any:
        """Returns the array in the dtype in which losses and metrics are summed: float64 if the framework has it."""

    def cast_like(self, value: Any, array: Any) -> Any:
        """Returns an array or a number in the type, and on the device, of `array`."""

    def average(self, array: Any) -> Any:
        """Returns the mean of all elements, in the array's own type."""

    def average_rows(self, array: Any, examples: int) -> Any:
        """Returns the mean of every example's elements, as a vector."""

    def total(self, array: Any) -> Any:
        """Returns the sum of all elements, in the array's own type."""

    def scale(self, array: Any, factor: Any) -> Any:
        """Returns array * factor, in the array's type."""

    def divide(self, array: Any, by: Any) -> Any:
        """Returns array / by. If `by` is 0, the result is not used."""

    def as_weight(self, value: Any) -> Any:
        """Returns a number by which a sum is divided, in a type that can be compared with 0."""

    def as_column(self, weights: Any, values: Any) -> Any:
        """Returns one weight per example in the shape (examples, 1, ...), with as many axes as `values`."""

    def where(self, condition: Any, array: Any, other: Any) -> Any:
        """Returns `array` if the condition is true, else `other`, element by element."""

    def any_nonzero(self, array: Any) -> Any:
        """Returns whether an element is not 0."""

    def is_finite_nonzero(self, value: Any) -> Any:
        """Returns whether a scalar is finite and not 0."""

    def is_short(self, array: Any) -> bool:
        """Returns whether gradients of this dtype are added in a wider dtype, so that a scaled one would be rounded."""

    def argmax(self, array: Any, axis: int) -> Any:
        """Returns the position of the largest element on an axis."""

    def has_in_top(self, array: Any, labels: Any, num: int, axis: int) -> Any:
        """Returns whether the label is among the positions of the `num` largest elements on the axis."""

    def equal(self, left: Any, right: Any) -> Any:
        """Returns whether elements are equal as numbers, whatever their types."""

    def count_true(self, array: Any) -> Any:
        """Returns the number of elements that are true."""


def name_dtype(array: Any) -> str:
    """Returns the name of the type of an array of any framework.

    >>> import numpy
    >>> name_dtype(numpy.ones(2, "float16"))
    'float16'
    """
    dtype = array.dtype  # a string, a class, or an object with a name
    return str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).rpartition(".")[2].rstrip("_")
