"""Checks that raise an error for what Lockstep cannot train with MXNet, with what to change."""

from collections.abc import Iterator, Mapping
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon.contrib.nn import SyncBatchNorm

from lockstep.backends.base import Recipe
from lockstep.errors import ExactError, ModelError, PlanError

# Values of MXNET_ENGINE_TYPE for which one thread computes for each CPU context.
_ENGINES = (None, "", "ThreadedEnginePerDevice", "NaiveEngine")


def iterate_blocks(block: Any) -> Iterator[Any]:
    """Yields the block and all blocks inside it."""
    yield block
    for child in block._children.values():
        yield from iterate_blocks(child)


def check_recipe(recipe: Recipe) -> None:
    """Raises an error if the block, the engine or an option is not supported."""
    check_block(recipe.model)
    if recipe.options.exact:
        check_engine()
    if recipe.options.precision is not None:
        raise PlanError(
            f"precision={recipe.options.precision!r} is not supported with MXNet, where a block has one dtype. "
            "Use net.cast('float16'), and multi_precision=True in the optimizer."
        )


def check_block(block: Any) -> None:
    """Raises ModelError if the model is not a gluon block, or has a SyncBatchNorm."""
    if not isinstance(block, gluon.Block):
        raise ModelError(
            f"An MXNet model must be a gluon block. Got {type(block).__name__}. "
            "Give the block itself, or gluon.SymbolBlock(...) for a Symbol."
        )
    for each in iterate_blocks(block):
        if isinstance(each, SyncBatchNorm):
            raise ModelError(
                f"The block {each.name!r} is a SyncBatchNorm, which is not supported, because each shard is normalized "
                "by itself. Use nn.BatchNorm; the number of shards sets how many examples it normalizes over."
            )


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Raises ModelError if a parameter is not initialized or is sparse, or if no parameter is trained."""
    for name, parameter in parameters.items():
        if parameter._data is None and not parameter._deferred_init:
            raise ModelError(f"Parameter {name!r} is not initialized. Call net.initialize() before lockstep.wrap.")
        if parameter._stype != "default" or parameter._grad_stype != "default":
            raise ModelError(
                f"Parameter {name!r} is sparse or has a sparse gradient, which is not supported. "
                "Use sparse_grad=False and stype='default'."
            )
    if not any(parameter.grad_req != "null" for parameter in parameters.values()):
        raise ModelError(
            f"The block has nothing to train: all of its {len(parameters)} parameters have grad_req='null'. "
            "Set grad_req='write' on the parameters to train."
        )


def check_graphs(block: Any) -> None:
    """Raises ModelError for a graph with static shapes, which writes all shards' gradients to the same arrays."""
    for each in iterate_blocks(block):
        if getattr(each, "_active", False) and dict(each._flags).get("static_shape"):
            raise ModelError(
                f"The block {each.name!r} is hybridized with static_shape=True, which is not supported, because it "
                "writes every gradient to the arrays of its first pass. Use net.hybridize(static_alloc=True)."
            )


def check_engine() -> None:
    """Raises ExactError if several threads compute for one context, as each has its own number of OpenMP threads."""
    kind, count = mx.util.getenv("MXNET_ENGINE_TYPE"), mx.util.getenv("MXNET_CPU_WORKER_NTHREADS")
    if kind not in _ENGINES or count not in (None, "", "1"):
        name, value = ("MXNET_CPU_WORKER_NTHREADS", count) if kind in _ENGINES else ("MXNET_ENGINE_TYPE", kind)
        raise ExactError(
            f"With {name}={value} several threads of MXNet's engine compute for one context, and results "
            f"may depend on which thread does. Unset {name}, or use exact=False."
        )


def check_optimizer(optimizer: Any) -> None:
    """Raises ExactError if the optimizer accumulates gradients outside its state, which a checkpoint would lack."""
    if isinstance(optimizer, mx.optimizer.LBSGD):
        raise ExactError(
            "LBSGD is not supported, because it accumulates gradients outside the optimizer state, so they would be "
            "missing in a checkpoint. Use 'lars', or 'sgd' with a larger batch; or exact=False."
        )
