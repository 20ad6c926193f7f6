"""Shards: a compiled loss and its metrics as the JAX backend's term and sums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax import array_ops
from lockstep.backends.jax.losses import WEIGHING
from lockstep.backends.jax.shards import Found, Shards
from lockstep.backends.keras import losses
from lockstep.backends.keras.compiled import Compiled, parts
from lockstep.backends.keras.on_jax.net import Net
from lockstep.core.shard_sums import list_loss_parts
from lockstep.core.weighing import Share, Term


class KerasShards(Shards):
    """A shard's compiled loss and metrics as the JAX backend's term and sums."""

    def __init__(self, net: Net, compiled: Compiled) -> None:
        super().__init__(net, None, [], None)
        self._compiled = compiled
        self._term = self._weigh

    def _weigh(self, model: Any, batch: Any, share: Share) -> Term:
        """What is differentiated, and what the sums get; `outputs` carries the metrics' variables."""
        outcome = model.outcome(batch)
        share = share._replace(summed=share.summed and parts(batch)[2] is None)
        values = outcome.value, outcome.extra, outcome.counted
        return losses.weigh(WEIGHING, self._compiled.model, *values, share, outputs=outcome.sums, labels=outcome.labels)

    def _measure(self, term: Term, share: Share, found: Found) -> Any:
        """[loss, weight, divided, the metrics' variables ...] of one shard, before the host's scale of the loss."""
        found.labels = term.labels
        head = [jnp.asarray(value) for value, _ in list_loss_parts(term)]
        flat = [jnp.ravel(jax.lax.stop_gradient(each)).astype(array_ops.wide()) for each in (*head, *term.outputs)]
        found.divided = not (isinstance(term.divided, float) and term.divided == 0.0)
        found.columns = self._compiled.measures.columns()
        found.scales = np.array([term.times, *[1.0] * (sum(each.size for each in flat) - 1)])
        return jnp.concatenate(flat), None
