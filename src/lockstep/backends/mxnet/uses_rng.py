"""Finds out whether a shard may draw random numbers, so that its context must be seeded.

Seeding a context takes 1.3 ms, because MXNet has 1,024 generators there. So contexts are not seeded for code that is
known to draw nothing: gluon's own layers and losses, and graphs without an operator that draws. A block of the script's
own may do something else in every pass, until it is hybridized and has run once; from then on only its graph runs. For
all other code, contexts are seeded. MXNet has no more releases, so the list of operators that draw is complete.
"""

import json
import re
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

_KNOWN = ("mxnet.gluon.nn.", "mxnet.gluon.loss", "mxnet.gluon.model_zoo.", "lockstep.backends.mxnet.")
_WITH_FUNCTIONS = (nn.Lambda, nn.HybridLambda)  # gluon's classes, which call the script's functions
_DRAWING = re.compile(
    "random|sample|dropout|shuffle|multinomial|normal|uniform|bernoulli|gamma|exponential|gumbel|logistic|pareto"
    "|rayleigh|weibull|choice|rnn|custom|foreach|while_loop|_cond|dgl",
    re.IGNORECASE,
)


class DrawDetector:
    """Finds out before every step whether a block and its loss may draw random numbers; searches each graph once."""

    def __init__(self, block: Any, loss: Any) -> None:
        self._block = block
        self._loss = loss
        self._searched: dict[int, tuple[Any, bool]] = {}  # by id of the block: its graph, and whether it draws

    def may_draw(self) -> bool:
        """Returns whether a shard may draw random numbers; without a loss object the block computes its loss itself."""
        return self._may_block_draw(self._block) or (self._loss is not None and self._may_block_draw(self._loss))

    def _may_block_draw(self, block: Any) -> bool:
        if not isinstance(block, gluon.Block) or block._forward_hooks or block._forward_pre_hooks:
            return True
        if (graph := _get_graph(block)) is not None:
            return self._may_graph_draw(block, graph)
        if isinstance(block, nn.Dropout):
            return bool(block._rate > 0)
        if isinstance(block, _WITH_FUNCTIONS) or not type(block).__module__.startswith(_KNOWN):
            return True
        return any(map(self._may_block_draw, block._children.values()))

    def _may_graph_draw(self, block: Any, graph: Any) -> bool:
        last = self._searched.get(id(block))
        if last is None or last[0] is not graph:
            last = self._searched[id(block)] = graph, _has_drawing_operator(graph)
        return last[1]


def may_optimizer_draw(optimizer: Any) -> bool:
    """Returns whether the optimizer's step may draw random numbers."""
    own = type(optimizer).__module__.startswith("mxnet.optimizer.")
    return not own or isinstance(optimizer, mx.optimizer.SGLD)


def _get_graph(block: Any) -> Any:
    """Returns the graph that runs when the block is called; None if its Python code runs."""
    if isinstance(block, nn.SymbolBlock):
        return block._cached_graph[1]
    hybrid = isinstance(block, gluon.HybridBlock) and type(block).forward is gluon.HybridBlock.forward
    return block._cached_graph[1] if hybrid and block._active and block._cached_op is not None else None


def _has_drawing_operator(graph: Any) -> bool:
    """Returns whether any operator of the graph draws random numbers."""
    return any(_DRAWING.search(node["op"]) or _is_random_relu(node) for node in json.loads(graph.tojson())["nodes"])


def _is_random_relu(node: dict[str, Any]) -> bool:
    """Returns whether the operator is a leaky ReLU with a random slope."""
    return "LeakyReLU" in node["op"] and "rrelu" in str(node.get("attrs"))
