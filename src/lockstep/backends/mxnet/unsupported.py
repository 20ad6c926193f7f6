"""Refusals: what cannot be trained in parallel as it is, with the line to change."""

from collections.abc import Iterator, Mapping
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon.contrib.nn import SyncBatchNorm

from lockstep.errors import ExactError, ModelError

# Engines with one thread for each CPU context, or one for all.
_ENGINES = (None, "", "ThreadedEnginePerDevice", "NaiveEngine")


def blocks(block: Any) -> Iterator[Any]:
    """The block and all inside it."""
    yield block
    for child in block._children.values():
        yield from blocks(child)


def check_block(block: Any) -> None:
    """Refuses what is no gluon block."""
    if not isinstance(block, gluon.Block):
        raise ModelError(
            f"An MXNet model is a gluon block. Got {type(block).__name__}. "
            "Wrap the block itself; a Symbol becomes one with gluon.SymbolBlock."
        )
    for each in blocks(block):
        if isinstance(each, SyncBatchNorm):
            raise ModelError(
                f"Every shard has its own batch norm statistics. Got SyncBatchNorm at {each.name!r}. "
                "Use nn.BatchNorm and choose `shards` for the statistics you want."
            )


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuses parameters that nobody has initialized, and sparse ones."""
    for name, parameter in parameters.items():
        if parameter._data is None and not parameter._deferred_init:
            raise ModelError(
                f"A block is initialized before it is wrapped. Parameter {name!r} is not. Call net.initialize() first."
            )
        if parameter._stype != "default" or parameter._grad_stype != "default":
            raise ModelError(
                f"Gradients are dense. Got a sparse parameter at {name!r}. Use sparse_grad=False and stype='default'."
            )
    if not any(parameter.grad_req != "null" for parameter in parameters.values()):
        raise ModelError(
            f"Training needs a parameter to train. Got {len(parameters)}, all with grad_req='null'. "
            "Set grad_req='write' on some."
        )


def check_graphs(block: Any) -> None:
    """Refuses a graph that keeps to the arrays of its first pass: the gradients of other shards would go there."""
    for each in blocks(block):
        if getattr(each, "_active", False) and dict(each._flags).get("static_shape"):
            raise ModelError(
                "Every shard's gradient is written to an array of its own. Got a block hybridized with "
                "static_shape=True, which keeps to the arrays of its first pass. Use net.hybridize(static_alloc=True)."
            )


def check_engine() -> None:
    """Refuses an engine in which any thread of several computes for a context: each has its own OpenMP threads."""
    kind, count = mx.util.getenv("MXNET_ENGINE_TYPE"), mx.util.getenv("MXNET_CPU_WORKER_NTHREADS")
    if kind not in _ENGINES or count not in (None, "", "1"):
        name, value = ("MXNET_CPU_WORKER_NTHREADS", count) if kind in _ENGINES else ("MXNET_ENGINE_TYPE", kind)
        raise ExactError(
            f"One thread of MXNet's engine computes for a context. Got {name}={value}, which gives it several. "
            "Unset it, or use exact=False."
        )


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that keeps gradients where no checkpoint finds them."""
    if isinstance(optimizer, mx.optimizer.LBSGD):
        raise ExactError(
            "A run is resumed from its optimizer's slots. Got LBSGD, which gathers gradients outside of them. "
            "Use 'lars', or 'sgd' with a larger batch; or exact=False."
        )
