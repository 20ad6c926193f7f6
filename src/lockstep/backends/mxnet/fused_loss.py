"""Scored: a loss of gluon's own with its sum beside it, in one graph.

Told one by one, a loss's operators take the host longer than the engine, eight times
a step. So Lockstep runs a hybridized copy, which gives the same bits; the script's
own loss object stays as it is.
"""

import copy
from typing import Any

from mxnet import gluon
from mxnet.util import is_np_array

from lockstep.backends.mxnet.arrays import classic

# How the script runs its loss, which is not what it computes.
_PASSING = {"_cached_graph", "_cached_op", "_cached_op_args", "_active", "_flags"}
_OWN = ("mxnet.gluon.loss", "lockstep.backends.mxnet.cross_entropy")


class Scored:
    """The loss as it was when it was last asked for."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._made: tuple[Any, Any] = (None, None)

    def __call__(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """One loss per example, and their sum as a vector of one in float64."""
        losses, total = self._graph()(outputs, targets)
        return losses, classic(total)

    def _graph(self) -> Any:
        """The graph; a new one where the script has changed a number of the loss, or the kind of arrays."""
        numbers = is_np_array(), {name: value for name, value in vars(self._loss).items() if name not in _PASSING}
        if self._made[0] != numbers:
            graph = _Graph(self._loss)
            graph.hybridize()
            self._made = numbers, graph
        return self._made[1]


class _Graph(gluon.HybridBlock):  # type: ignore[misc]
    """A copy of the loss, and the sum of what it gives."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = copy.copy(loss)
        self.loss._clear_cached_op()

    def hybrid_forward(self, F: Any, outputs: Any, targets: Any) -> Any:
        losses = self.loss(outputs, targets)
        if is_np_array():
            return losses, F.np.sum(losses.astype("float64"), keepdims=True)
        return losses, F.sum(F.cast(losses, dtype="float64"), axis=0, keepdims=True)


def known(loss: Any) -> bool:
    """Whether this is a loss of gluon's own or of ours, with one value per example."""
    return type(loss).__module__ in _OWN and isinstance(loss, gluon.loss.Loss)
