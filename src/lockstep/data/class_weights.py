"""Class weights: every example weighs what its class does, beside a weight of its own.

They become example weights while the batch is still whole, so every framework has
them, and a shard knows nothing of classes.
"""

from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.batches import describe
from lockstep.core.weights import split_batch
from lockstep.data.source import PipelineSource, Source
from lockstep.errors import BatchError


class ClassWeights:
    """Puts the weights of their classes beside the examples of a batch; 1 for a class that is left out, as in Keras.

    >>> ClassWeights({1: 5.0})(np.zeros((3, 2)), np.array([0, 1, 1]))[2]
    array([1., 5., 5.])
    """

    def __init__(self, weights: Mapping[int, float], takes_integers: bool = False) -> None:
        if not isinstance(weights, Mapping) or not weights or not _numbers(weights):
            raise BatchError(
                f"class_weight gives every class its weight. Got {weights!r}. Use for example {{0: 1.0, 1: 5.0}}."
            )
        self._takes_integers = takes_integers  # as example weights, which elsewhere may as well be an index
        self._classes = np.array(sorted(weights))
        self._weights = np.array([weights[each] for each in sorted(weights)], "float64")

    def __call__(self, *batch: Any) -> tuple[Any, Any, Any]:
        """(inputs, targets, weights) out of (inputs, targets) or (inputs, targets, weights)."""
        if len(batch) not in (2, 3):
            raise BatchError(
                "class_weight looks at the targets of (inputs, targets) or (inputs, targets, weights). "
                f"Got {describe(batch)}. Give one of these, or weigh the examples in an objective."
            )
        if not self._takes_integers:
            split_batch(batch, 'weights.astype("float32")')  # times a class's weight an index is a float, too
        inputs, targets, *own = batch
        found = self._of(_classes(targets))
        if not own or own[0] is None:
            return inputs, targets, found
        weights = np.asarray(own[0])
        if weights.size != len(found):
            raise BatchError(
                f"Beside class_weight every example has one weight. Got weights of shape {weights.shape} for "
                f"{len(found)} examples. Give one number for each, or leave class_weight out."
            )
        return inputs, targets, found * weights.reshape(-1)

    def _of(self, classes: NDArray[np.int64]) -> NDArray[np.float64]:
        places = np.searchsorted(self._classes, classes).clip(max=len(self._classes) - 1)
        weights: NDArray[np.float64] = np.where(self._classes[places] == classes, self._weights[places], 1.0)
        return weights


def _numbers(weights: Mapping[Any, Any]) -> bool:
    """Whether these are whole numbers, numpy's too, with numbers."""
    return all(isinstance(key, Integral) and isinstance(value, Real) for key, value in weights.items())


def _classes(targets: Any) -> NDArray[np.int64]:
    """The class of every example: a whole number, or the 1 in a row of zeros."""
    if isinstance(targets, tuple | list | dict):
        raise BatchError(
            f"class_weight is for a model with one output. Got targets {describe(targets)}. "
            "Give example weights, (inputs, targets, weights), instead."
        )
    values = np.asarray(targets)
    rows = values.reshape(len(values), -1)
    if values.ndim == 2 and values.shape[1] > 1 and ((rows == 0) | (rows == 1)).all() and (rows.sum(1) == 1).all():
        return np.asarray(rows.argmax(1), np.int64)
    if rows.shape[1] != 1 or (rows != np.round(rows)).any():
        raise BatchError(
            "class_weight is for targets that are one class each: whole numbers, or rows with a single 1. Got odds, or "
            f"several values per example: {describe(targets)}. Give example weights, (inputs, targets, weights)."
        )
    return np.asarray(rows[:, 0], np.int64)


def weighed(
    source: Source, weights: Mapping[int, float] | None, host: Callable[[Any], Any], takes_integers: bool = False
) -> Source:
    """The source with the weights of the classes; `host` makes numpy of the framework's own arrays.

    `takes_integers` says that integers as a third entry are example weights, as for a Keras model.
    """
    if weights is None:
        return source
    put = ClassWeights(weights, takes_integers)
    if isinstance(source, PipelineSource):  # where the examples are read
        return PipelineSource(source.pipeline.map(put))
    return WeighedSource(source, put, host)


class WeighedSource:
    """Another source's batches, with the weights of their classes."""

    def __init__(self, source: Source, put: ClassWeights, host: Callable[[Any], Any]) -> None:
        self._source, self._put, self._host = source, put, host
        self.num_examples, self.num_steps, self.batch_size = source.num_examples, source.num_steps, source.batch_size
        self.endless, self.once, self.resumes = source.endless, source.once, source.resumes

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The batches of the epoch."""
        for batch in self._source.epoch(index, start, state):
            parts = batch if isinstance(batch, tuple) else (batch,)
            yield self._put(*parts[:1], *map(self._host, parts[1:]))

    def state(self) -> Any:
        """The source's own."""
        return self._source.state()
