"""Cross-entropy with targets left out and classes that weigh more, which gluon does not have."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mxnet.gluon.loss import SoftmaxCrossEntropyLoss
from mxnet.util import is_np_array
from numpy.typing import NDArray


class CrossEntropy(SoftmaxCrossEntropyLoss):  # type: ignore[misc]
    """Softmax cross-entropy over class indices; its mean divides by what the targets weigh.

    A target equal to `ignore_index` weighs nothing, any other what its class does.

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
        """What each target weighs, on the host."""
        counted = np.ones(targets.shape, bool) if self.ignore_index is None else targets != self.ignore_index
        if self.weights is None:
            return counted.astype("float64")
        classes = np.where(counted, targets, 0).astype("int64")
        each: NDArray[np.float64] = np.where(counted, self.weights[classes], 0.0)
        return each

    def hybrid_forward(self, F: Any, pred: Any, label: Any, sample_weight: Any = None) -> Any:
        """The loss of every example, unweighted: an example with several targets gives their mean.

        With `sample_weight`, one number for each target, the weighted sum over each example's targets.
        """
        functions = F.npx if is_np_array() else F
        if not self._from_logits:
            pred = functions.log_softmax(pred, axis=self._axis)
        losses = -functions.pick(pred, label, axis=self._axis)
        if sample_weight is not None:
            losses = losses * sample_weight
        losses = functions.batch_flatten(losses) if is_np_array() else F.flatten(losses)  # (examples, targets)
        return losses.mean(axis=1) if sample_weight is None else losses.sum(axis=1)
