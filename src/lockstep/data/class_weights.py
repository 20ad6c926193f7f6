"""Class weights: the weight of each example is multiplied by the weight of its class.

Class weights are converted to example weights before a batch is split into shards, so every framework supports them.
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
                f"class_weight={weights!r} must be a dict of class indices and weights. Use for example "
                f"{{0: 1.0, 1: 5.0}}."
            )
        self._takes_integers = takes_integers  # as example weights; otherwise integers are refused as a possible index
        self._classes = np.array(sorted(weights))
        self._weights = np.array([weights[each] for each in sorted(weights)], "float64")

    def __call__(self, *batch: Any) -> tuple[Any, Any, Any]:
        """Returns the batch as (inputs, targets, weights), with the class weights multiplied into the weights."""
        if len(batch) not in (2, 3):
            raise BatchError(
                f"class_weight needs batches (inputs, targets) or (inputs, targets, weights), not {describe(batch)}. "
                "Give such batches, or multiply the loss by the class weights in an objective."
            )
        if not self._takes_integers:
            split_batch(batch, 'weights.astype("float32")')  # checked now: the product with a class weight is a float
        inputs, targets, *own = batch
        class_weights = self._look_up(_read_classes(targets))
        if not own or own[0] is None:
            return inputs, targets, class_weights
        weights = np.asarray(own[0])
        if weights.size != len(class_weights):
            raise BatchError(
                "class_weight needs one example weight per example, but the batch has weights of shape "
                f"{weights.shape} for {len(class_weights)} examples. Give one weight for each example, or leave "
                "class_weight out."
            )
        return inputs, targets, class_weights * weights.reshape(-1)

    def _look_up(self, classes: NDArray[np.int64]) -> NDArray[np.float64]:
        places = np.searchsorted(self._classes, classes).clip(max=len(self._classes) - 1)
        weights: NDArray[np.float64] = np.where(self._classes[places] == classes, self._weights[places], 1.0)
        return weights


def _is_valid(weights: Mapping[Any, Any]) -> bool:
    """Returns whether all keys are integers and all values are real numbers."""
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
            "class_weight needs one class per example as the target: an integer, or a one-hot row. The targets "
            f"{describe(targets)} are probabilities or have several values per example. Use example weights, (inputs, "
            "targets, weights), instead."
        )
    return np.asarray(rows[:, 0], np.int64)


def add_class_weights(
    source: Source, weights: Mapping[int, float] | None, host: Callable[[Any], Any], takes_integers: bool = False
) -> Source:
    """Returns a source of the same batches with class weights added; the source itself if `weights` is None.

    `host` converts the framework's arrays to numpy. `takes_integers` says that integers as the third entry of a batch
    are example weights, as for a Keras model.
    """
    if weights is None:
        return source
    add_weights = ClassWeights(weights, takes_integers)
    if isinstance(source, PipelineSource):  # the processes that read the examples compute the weights
        return PipelineSource(source.pipeline.map(add_weights))
    return ClassWeightedSource(source, add_weights, host)


class ClassWeightedSource:
    """A source that adds class weights to the batches of another source."""

    def __init__(self, source: Source, add_weights: ClassWeights, host: Callable[[Any], Any]) -> None:
        self._source, self._add_weights, self._host = source, add_weights, host
        self.num_examples, self.num_steps, self.batch_size = source.num_examples, source.num_steps, source.batch_size
        self.endless, self.once, self.resumes = source.endless, source.once, source.resumes

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the batches of the epoch with class weights."""
        for batch in self._source.epoch(index, start, state):
            parts = batch if isinstance(batch, tuple) else (batch,)
            yield self._add_weights(*parts[:1], *map(self._host, parts[1:]))

    def state(self) -> Any:
        """Returns the state of the other source; class weights have no state."""
        return self._source.state()
