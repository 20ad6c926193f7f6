"""Draws: whether a shard may draw random numbers.

To seed a context takes 1.3 ms of its time, for MXNet keeps 1,024 generators there.
So what is known to draw nothing is not seeded: gluon's own layers and losses, and
blocks whose graph holds no operator that draws. Whatever is not known is seeded.
MXNet is complete, and with it the list of operators that draw.
"""

import json
import re
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from lockstep.backends.mxnet.refusals import blocks

_KNOWN = ("mxnet.gluon.nn.", "mxnet.gluon.loss", "mxnet.gluon.model_zoo.", "lockstep.backends.mxnet.")
_FOREIGN = (nn.Lambda, nn.HybridLambda, nn.SymbolBlock)  # with functions or graphs of the script's own
_DRAWING = re.compile(
    "random|sample|dropout|shuffle|multinomial|normal|uniform|bernoulli|gamma|exponential|gumbel|logistic|pareto"
    "|rayleigh|weibull|choice|rnn|custom|foreach|while_loop|_cond|dgl",
    re.IGNORECASE,
)


class Watch:
    """Looks at a block and its loss before every step; a graph is looked through once."""

    def __init__(self, block: Any, loss: Any) -> None:
        self._block = block
        self._loss = loss
        self._looked_through: dict[tuple[Any, ...], bool] = {}

    def may_draw(self, num_inputs: int) -> bool:
        """Whether a shard may draw."""
        return self._loss_may() or self._block_may(num_inputs)

    def _loss_may(self) -> bool:
        """Of functions nobody knows; without a loss it is the block's own."""
        known = type(self._loss).__module__.startswith(_KNOWN) and isinstance(self._loss, gluon.loss.Loss)
        return self._loss is not None and (not known or _hooked(self._loss))

    def _block_may(self, num_inputs: int) -> bool:
        strangers = []
        for each in blocks(self._block):
            if _hooked(each) or (isinstance(each, nn.Dropout) and each._rate > 0):
                return True
            if isinstance(each, _FOREIGN) or not type(each).__module__.startswith(_KNOWN):
                strangers.append(id(each))
        key = (*strangers, num_inputs, mx.util.is_np_array())
        if strangers and key not in self._looked_through:
            self._looked_through[key] = _graph_draws(self._block, num_inputs)
        return bool(strangers) and self._looked_through[key]


def by_optimizer(optimizer: Any) -> bool:
    """Whether the update may draw."""
    own = type(optimizer).__module__.startswith("mxnet.optimizer.")
    return not own or isinstance(optimizer, mx.optimizer.SGLD)


def _hooked(block: Any) -> bool:
    return bool(block._forward_hooks or block._forward_pre_hooks)


def _graph_draws(block: Any, num_inputs: int) -> bool:
    """Whether the block's graph holds an operator that draws; also where it cannot be told."""
    if not isinstance(block, gluon.HybridBlock):
        return True
    inputs = [mx.sym.var(f"input{index}") for index in range(num_inputs)]
    if mx.util.is_np_array():
        inputs = [each.as_np_ndarray() for each in inputs]
    try:
        with autograd.train_mode():
            outputs = block(*inputs)
        graph = json.loads((mx.sym.Group(outputs) if isinstance(outputs, tuple | list) else outputs).tojson())
    except Exception:
        return True
    return any(_DRAWING.search(node["op"]) or _leaks(node) for node in graph["nodes"])


def _leaks(node: dict[str, Any]) -> bool:
    """Whether this is the rectifier with a random slope."""
    return "LeakyReLU" in node["op"] and "rrelu" in str(node.get("attrs"))
