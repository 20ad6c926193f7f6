"""toynet's array functions: see `lockstep.backends.array_ops.ArrayOps`. `as_array` is toynet's own."""

import numpy as np
from toynet import Array, as_array

# -- for the collectives


def copy(arrays, device):
    return [Array(np.array(array.values, order="C")) for array in arrays]


def cut(array, where, device):
    return Array(np.array(array.values[where], order="C"))


def absent(array):
    return ""


def check(array):
    return ""


def add(left, right):
    return Array(left.values + right.values)


def write(value, target):
    target.values[...] = value.values
    return target


# -- for the averages of `lockstep.EMA`


def widen(array):
    short = array.dtype == np.float16
    return Array(np.array(array.values, np.float32 if short else array.dtype))


def update_averages(averages, values, decay):
    for average, value in zip(averages, values, strict=True):
        average.values *= decay
        average.values += value.values * (1 - decay)
    return averages


def to_numpy(array):
    return np.array(array.values)


def from_numpy(data, like):
    return Array(np.array(data))


# -- for losses and metrics


def is_array(value):
    return isinstance(value, Array)


def to_host(array):
    return array.values


def shape(array):
    return array.shape


def reshape(array, shape):
    return array.reshape(shape)


def double(array):
    return Array(np.asarray(array, "float64"))


def cast_like(value, array):
    return Array(np.asarray(value, array.dtype))


def average(array):
    return array.mean()


def average_rows(array, examples):
    rows = array.reshape((examples, -1))
    width = rows.shape[1]
    return Array(rows.values.mean(1), [(rows, lambda up: np.repeat(up[:, None] / width, width, 1))])


def total(array):
    return array.sum()


def scale(array, factor):
    return array * factor


def divide(array, by):
    return array / (as_weight(by) or 1.0)


def as_weight(value):
    return float(np.asarray(value))  # a plain number, because toynet's arrays are on the host


def as_column(weights, values):
    return weights.reshape((-1, *[1] * (values.values.ndim - 1)))


def where(condition, array, other):
    return Array(np.where(*map(np.asarray, (condition, array, other))))


def any_nonzero(array):
    return bool(array.values.any())


def is_finite_nonzero(value):
    number = as_weight(value)
    return bool(np.isfinite(number) and number != 0)


def is_short(array):
    return False


def argmax(array, axis):
    return Array(array.values.argmax(axis))


def has_in_top(array, labels, num, axis):
    best = np.take(np.argsort(-array.values, axis, kind="stable"), range(num), axis)
    return Array((best == np.expand_dims(labels.values, axis)).any(axis))


def equal(left, right):
    return Array(np.equal(as_array(left).values, as_array(right).values))


def count_true(array):
    return Array(array.values.sum())
