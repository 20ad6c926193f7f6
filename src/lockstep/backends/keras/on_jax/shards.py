"""Shards: a compiled loss and its metrics as the JAX backend's term and sums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax import vector_fields
from lockstep.backends.jax.losses import Share, Term, mean
from lockstep.backends.jax.shards import Found, Shards
from lockstep.backends.keras import losses
from lockstep.backends.keras.compiled import Compiled, parts
from lockstep.backends.keras.on_jax.net import Net


class KerasShards(Shards):
    """A shard's compiled loss and metrics as the JAX backend's term and sums."""

    def __init__(self, net: Net, compiled: Compiled) -> None:
        super().__init__(net, None, [], None)
        self._compiled = compiled
        self._term = self._weighed

    def _weighed(self, model: Any, batch: Any, share: Share) -> Term:
        """What is differentiated, and what the sums get; `values` carries the metrics' variables."""
        outcome = model.outcome(batch)
        value, rest = outcome.value, {"outputs": outcome.sums}
        if losses.summed(self._compiled.model, share.summed and parts(batch)[2] is None):
            extra = jnp.asarray(outcome.extra, value.dtype)  # regularization counts once
            value = value if share.alone else value - extra + extra * jnp.asarray(share.fraction, value.dtype)
            return Term(value, value, 0.0, **rest)
        if outcome.counted is None:
            return mean(value, share, **rest)
        weight, there, summed = outcome.counted
        total = value * weight.astype(value.dtype)
        if share.alone:
            there = weight != 0  # a batch whose weights cancel is refused
            return Term(value, jnp.where(there, total, 0), weight, jnp.where(there, 0.0, 1.0), there=there, **rest)
        if summed is not None:
            total = jnp.where(weight != 0, total, summed.astype(value.dtype))
        return Term(total, jnp.where(there, total, 0), weight, 1.0, there=there, **rest)

    def _measure(self, term: Term, share: Share, found: Found) -> Any:
        """[loss, weight, divided, the metrics' variables ...] of one shard, before the host's scale of the loss."""
        head = [jnp.asarray(each) for each in (term.loss, term.weight, term.divided)]
        flat = [jnp.ravel(jax.lax.stop_gradient(each)).astype(vector_fields.wide()) for each in (*head, *term.outputs)]
        found.divided = not (isinstance(term.divided, float) and term.divided == 0.0)
        found.columns = self._compiled.measures.columns()
        found.scales = np.array([term.scale, *[1.0] * (sum(each.size for each in flat) - 1)])
        return jnp.concatenate(flat), None
