"""Builds the JAX functions that compute one shard with a compiled Keras model's loss and metrics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax import array_ops
from lockstep.backends.jax.losses import WEIGHING
from lockstep.backends.jax.shard_pass import ShardPasses, TraceInfo
from lockstep.backends.keras import losses
from lockstep.backends.keras.on_jax.model import KerasJaxModel
from lockstep.backends.keras.stateless_model import CompiledModel, split_batch
from lockstep.core.outputs import Outputs
from lockstep.core.shard_sums import list_loss_parts
from lockstep.core.weighing import Share, Term


class KerasShardPasses(ShardPasses):
    """Builds the functions that compute one shard with the compiled loss and metrics."""

    def __init__(self, model: KerasJaxModel, compiled: CompiledModel) -> None:
        super().__init__(model, None, [], None)
        self._compiled = compiled
        self._weigh_loss = self._weigh_compiled_loss

    def _weigh_compiled_loss(self, model: Any, batch: Any, share: Share) -> Term:
        """Returns the `Term` of the compiled loss, with the metrics' variables as its `outputs`."""
        result = model.compute(batch)
        share = share._replace(summed=share.summed and split_batch(batch)[2] is None)
        loss = result.loss, result.extra_loss, result.counted
        return losses.weigh(WEIGHING, self._compiled.model, *loss, share, outputs=result.sums, labels=result.labels)

    def _measure(self, term: Term, share: Share, info: TraceInfo) -> Any:
        """Returns the loss, the weight, whether to divide, and the metrics' sums; the host scales the loss later."""
        info.labels = term.labels
        head = [jnp.asarray(value) for value, _ in list_loss_parts(term)]
        flat = [jnp.ravel(jax.lax.stop_gradient(each)).astype(array_ops.wide()) for each in (*head, *term.outputs)]
        info.divided = not (isinstance(term.divided, float) and term.divided == 0.0)
        info.columns = self._compiled.metrics.list_columns()
        info.scales = np.array([term.times, *[1.0] * (sum(each.size for each in flat) - 1)])
        return jnp.concatenate(flat), Outputs()
