"""Cross-entropy with an ignored label and class weights, which gluon does not have."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mxnet.gluon.loss import SoftmaxCrossEntropyLoss
from mxnet.util import is_np_array
from numpy.typing import NDArray


class CrossEntropy(SoftmaxCrossEntropyLoss):  # type: ignore[misc]
    """Softmax cross-entropy over class indices; its mean divides by the sum of the targets' weights.

    A target equal to `ignore_index` has weight 0, and any other target the weight of its class.

    >>> import mxnet as mx
    >>> loss = CrossEntropy(ignore_index=2)
    >>> loss.target_weights(np.array([0, 2, 1])).tolist()
    [1.0, 0.0, 1.0]
    >>> loss(mx.nd.zeros((3, 2)), mx.nd.array([0, 2, 1])).shape
    (3,)
    """

    def __init__(self, ignore_index: int | None = None, weights: Sequence[float] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.ignore_index = ignore_index
        self.weights = None if weights is None else np.asarray(weights, "float64")

    def target_weights(self, targets: NDArray[Any]) -> NDArray[np.float64]:
        """Returns the weight of each target, on the host."""
        counted = np.ones(targets.shape, bool) if self.ignore_index is None else targets != self.ignore_index
        if self.weights is None:
            return counted.astype("float64")
        classes = np.where(counted, targets, 0).astype("int64")
        each: NDArray[np.float64] = np.where(counted, self.weights[classes], 0.0)
        return each

    def hybrid_forward(self, F: Any, pred: Any, label: Any, sample_weight: Any = None) -> Any:
        """Returns the unweighted loss of every example: the mean over its targets.

        With `sample_weight`, one number per target, the loss is the weighted sum over the example's targets.
        """
        functions = F.npx if is_np_array() else F
        if not self._from_logits:
            pred = functions.log_softmax(pred, axis=self._axis)
        losses = -functions.pick(pred, label, axis=self._axis)
        if sample_weight is not None:
            losses = losses * sample_weight
        losses = functions.batch_flatten(losses) if is_np_array() else F.flatten(losses)  # (examples, targets)
        return losses.mean(axis=1) if sample_weight is None else losses.sum(axis=1)
