"""Class weights: the weight of an example's class, multiplied with its own weight.

They become example weights while the batch is whole, so every framework supports them, and shards need not know them.
"""

from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.batch_entries import split_batch
from lockstep.core.batches import describe
from lockstep.data.source import PipelineSource, Source
from lockstep.errors import BatchError


class ClassWeights:
    """Adds class weights to a batch, as example weights. A class that is left out has weight 1, as in Keras.

    >>> ClassWeights({1: 5.0})(np.zeros((3, 2)), np.array([0, 1, 1]))[2]
    array([1., 5., 5.])
    """

    def __init__(self, weights: Mapping[int, float], takes_integers: bool = False) -> None:
        if not isinstance(weights, Mapping) or not weights or not _is_valid(weights):
            raise BatchError(
                f"class_weight={weights!r} is not a dict of classes and weights. Use for example {{0: 1.0, 1: 5.0}}."
            )
        self._takes_integers = takes_integers  # as example weights, which elsewhere may as well be an index
        self._classes = np.array(sorted(weights))
        self._weights = np.array([weights[each] for each in sorted(weights)], "float64")

    def __call__(self, *batch: Any) -> tuple[Any, Any, Any]:
        """Returns (inputs, targets, weights) for (inputs, targets) or (inputs, targets, weights)."""
        if len(batch) not in (2, 3):
            raise BatchError(
                f"class_weight needs batches (inputs, targets) or (inputs, targets, weights), not {describe(batch)}. "
                "Use one of these, or multiply the weights in an objective."
            )
        if not self._takes_integers:
            split_batch(batch, 'weights.astype("float32")')  # times a class's weight an index is a float, too
        inputs, targets, *own = batch
        class_weights = self._look_up(_read_classes(targets))
        if not own or own[0] is None:
            return inputs, targets, class_weights
        weights = np.asarray(own[0])
        if weights.size != len(class_weights):
            raise BatchError(
                f"class_weight needs one weight per example, but the batch has weights of shape {weights.shape} for "
                f"{len(class_weights)} examples. Use one weight for each, or leave class_weight out."
            )
        return inputs, targets, class_weights * weights.reshape(-1)

    def _look_up(self, classes: NDArray[np.int64]) -> NDArray[np.float64]:
        places = np.searchsorted(self._classes, classes).clip(max=len(self._classes) - 1)
        weights: NDArray[np.float64] = np.where(self._classes[places] == classes, self._weights[places], 1.0)
        return weights


def _is_valid(weights: Mapping[Any, Any]) -> bool:
    """Returns whether the keys are integers and the values numbers, Python's or numpy's."""
    return all(isinstance(key, Integral) and isinstance(value, Real) for key, value in weights.items())


def _read_classes(targets: Any) -> NDArray[np.int64]:
    """Returns the class of every example: an integer, or the position of the 1 in a one-hot row."""
    if isinstance(targets, tuple | list | dict):
        raise BatchError(
            f"class_weight needs a model with one output, but the targets are {describe(targets)}. "
            "Use example weights, (inputs, targets, weights), instead."
        )
    values = np.asarray(targets)
    rows = values.reshape(len(values), -1)
    if values.ndim == 2 and values.shape[1] > 1 and ((rows == 0) | (rows == 1)).all() and (rows.sum(1) == 1).all():
        return np.asarray(rows.argmax(1), np.int64)
    if rows.shape[1] != 1 or (rows != np.round(rows)).any():
        raise BatchError(
            "class_weight needs targets of one class each: integers, or one-hot rows. "
            f"{describe(targets)} has probabilities or several values per example. Use example weights, (inputs, "
            "targets, weights)."
        )
    return np.asarray(rows[:, 0], np.int64)


def add_class_weights(
    source: Source, weights: Mapping[int, float] | None, host: Callable[[Any], Any], takes_integers: bool = False
) -> Source:
    """Return the source with class weights; `host` converts the framework's arrays to numpy.

    `takes_integers` says that integers as a third entry are example weights, as for a Keras model.
    """
    if weights is None:
        return source
    add_weights = ClassWeights(weights, takes_integers)
    if isinstance(source, PipelineSource):  # computed where the examples are read
        return PipelineSource(source.pipeline.map(add_weights))
    return ClassWeightedSource(source, add_weights, host)


class ClassWeightedSource:
    """Another source's batches, with class weights."""

    def __init__(self, source: Source, add_weights: ClassWeights, host: Callable[[Any], Any]) -> None:
        self._source, self._add_weights, self._host = source, add_weights, host
        self.num_examples, self.num_steps, self.batch_size = source.num_examples, source.num_steps, source.batch_size
        self.endless, self.once, self.resumes = source.endless, source.once, source.resumes

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the batches of the epoch."""
        for batch in self._source.epoch(index, start, state):
            parts = batch if isinstance(batch, tuple) else (batch,)
            yield self._add_weights(*parts[:1], *map(self._host, parts[1:]))

    def state(self) -> Any:
        """Returns the source's own state."""
        return self._source.state()
