"""The function of one shard that is trained: its loss, and the sums of its metrics."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.backends.torch import array_ops, losses
from lockstep.backends.torch.model_loss import ModelLoss
from lockstep.backends.torch.shard_compiler import ShardCompiler
from lockstep.core.metrics import Column, Metric
from lockstep.core.shard_sums import Summand, find_room, list_loss_parts, measure
from lockstep.core.weighing import Share, Term


class ShardProgram:
    """The loss and the metrics that the script gave to `wrap`. Keras models bring a program of their own."""

    attribute_advice = "Make it a buffer: self.register_buffer(name, tensor)"
    is_prepared = True  # whether `prepare` was called with a first batch, or need not be
    # (model, shard's batch, share) -> the loss of a shard, and what its metrics compare; a field, so that it adds no
    # frame between the loop and the model
    compute: Callable[[nn.Module, Any, Share], Term]

    def __init__(self, loss: Any, metrics: Sequence[Metric], compiler: ShardCompiler) -> None:
        self.compute = ModelLoss(compiler.compile_call()) if loss is None else losses.choose_term(loss, compiler)
        self.metrics = metrics
        self.room = find_room(metrics, loss)  # of the metrics' sums
        self.reads_model_loss = loss is None  # whose meaning the shards must agree on

    def prepare(self, batch: Any) -> None:
        """Creates what needs a first batch, e.g. parameters without a shape; called if not `is_prepared`."""

    def measure(self, term: Term, examples: int) -> tuple[list[Summand], list[Column]]:
        """Returns the summands of a shard's loss and metrics, and the metrics' columns in the vector of sums."""
        if not self.metrics and not term.values:
            return list_loss_parts(term), []
        graded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what `torch.no_grad` does, without five calls for each shard
        try:
            return measure(array_ops, self.metrics, term, examples)
        finally:
            torch._C._set_grad_enabled(graded)
