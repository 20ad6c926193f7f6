"""Draws: whether a shard may draw random numbers.

To seed a context takes 1.3 ms of its time, for MXNet keeps 1,024 generators there.
So what is known to draw nothing is not seeded: gluon's own layers and losses, and
graphs that hold no operator that draws. A block of the script's own is Python, which
may do another thing in every pass, until it is hybridized and has run once; then the
graph it has made is all that runs. Whatever is not known is seeded. MXNet is complete,
and with it the list of operators that draw.
"""

import json
import re
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

_KNOWN = ("mxnet.gluon.nn.", "mxnet.gluon.loss", "mxnet.gluon.model_zoo.", "lockstep.backends.mxnet.")
_FOREIGN = (nn.Lambda, nn.HybridLambda)  # with functions of the script's own
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
        self._looked_through: dict[int, tuple[Any, bool]] = {}  # by block, the graph and whether it draws

    def may_draw(self) -> bool:
        """Whether a shard may draw; without a loss it is the block's own."""
        return self._may(self._block) or (self._loss is not None and self._may(self._loss))

    def _may(self, block: Any) -> bool:
        if not isinstance(block, gluon.Block) or block._forward_hooks or block._forward_pre_hooks:
            return True
        if (graph := _fixed(block)) is not None:
            return self._graph_draws(block, graph)
        if isinstance(block, nn.Dropout):
            return bool(block._rate > 0)
        if isinstance(block, _FOREIGN) or not type(block).__module__.startswith(_KNOWN):
            return True
        return any(map(self._may, block._children.values()))

    def _graph_draws(self, block: Any, graph: Any) -> bool:
        known = self._looked_through.get(id(block))
        if known is None or known[0] is not graph:
            known = self._looked_through[id(block)] = graph, _draws(graph)
        return known[1]


def by_optimizer(optimizer: Any) -> bool:
    """Whether the update may draw."""
    own = type(optimizer).__module__.startswith("mxnet.optimizer.")
    return not own or isinstance(optimizer, mx.optimizer.SGLD)


def _fixed(block: Any) -> Any:
    """The graph that runs whenever the block is called; None where its Python does."""
    if isinstance(block, nn.SymbolBlock):
        return block._cached_graph[1]
    hybrid = isinstance(block, gluon.HybridBlock) and type(block).forward is gluon.HybridBlock.forward
    return block._cached_graph[1] if hybrid and block._active and block._cached_op is not None else None


def _draws(graph: Any) -> bool:
    """Whether some operator of the graph draws."""
    return any(_DRAWING.search(node["op"]) or _leaks(node) for node in json.loads(graph.tojson())["nodes"])


def _leaks(node: dict[str, Any]) -> bool:
    """Whether this is the rectifier with a random slope."""
    return "LeakyReLU" in node["op"] and "rrelu" in str(node.get("attrs"))
