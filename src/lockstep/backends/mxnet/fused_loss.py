"""A gluon loss and the sum of its values in one graph.

The host needs more time to call the operators of a loss one by one than the engine needs to run them, and it does so
for every shard. So Lockstep runs a hybridized copy of the loss, which gives the same bits. The script's own loss object
stays as it is.
"""

import copy
from typing import Any

from mxnet import gluon
from mxnet.util import is_np_array

from lockstep.backends.mxnet.arrays import as_nd

# Attributes that say how a loss is run, not what it computes.
_NOT_COMPUTED = {"_cached_graph", "_cached_op", "_cached_op_args", "_active", "_flags"}
_MODULES = ("mxnet.gluon.loss", "lockstep.backends.mxnet.cross_entropy")


class FusedLoss:
    """A gluon loss, which has one value per example, as a graph that also sums these values."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._cached: tuple[Any, Any] = (None, None)

    def __call__(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Returns one loss per example, and the sum of these losses as a float64 vector of length 1."""
        losses, total = self._get_graph()(outputs, targets)
        return losses, as_nd(total)

    def _get_graph(self) -> Any:
        """Returns the graph; builds it again if the script has changed the loss's attributes or called `set_np`."""
        settings = is_np_array(), {name: value for name, value in vars(self._loss).items() if name not in _NOT_COMPUTED}
        if self._cached[0] != settings:
            graph = _Graph(self._loss)
            graph.hybridize()
            self._cached = settings, graph
        return self._cached[1]


class _Graph(gluon.HybridBlock):  # type: ignore[misc]
    """A block that computes a copy of the loss, and the sum of its values."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = copy.copy(loss)
        self.loss._clear_cached_op()

    def hybrid_forward(self, F: Any, outputs: Any, targets: Any) -> Any:
        losses = self.loss(outputs, targets)
        if is_np_array():
            return losses, F.np.sum(losses.astype("float64"), keepdims=True)
        return losses, F.sum(F.cast(losses, dtype="float64"), axis=0, keepdims=True)


def is_gluon_loss(loss: Any) -> bool:
    """Returns whether this is one of gluon's or Lockstep's loss classes, which return one value per example."""
    return type(loss).__module__ in _MODULES and isinstance(loss, gluon.loss.Loss)
