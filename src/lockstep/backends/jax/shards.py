"""Shards: one shard's forward and backward pass, as a function without loop or collective.

Every shard runs alone and at its own shape. What is compiled here knows of one
shard on one device, and of nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from lockstep.backends.jax import array_ops, losses, rng, vector_fields
from lockstep.backends.jax.batches import Form
from lockstep.backends.jax.models import Bound, Model
from lockstep.backends.jax.vector_fields import Fields
from lockstep.core.batch_entries import spread_inputs
from lockstep.core.metrics import Column, Metric
from lockstep.core.objective import Objective
from lockstep.core.shard_sums import measure
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Share, Term
from lockstep.errors import ModelError


@dataclass
class Found:
    """What tracing a shard has shown: how the host reads its sums, and which variables the model changes."""

    scales: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    columns: list[Column] = field(default_factory=list)
    changed: tuple[bool, ...] = ()
    labels: Labels | None = None  # what the targets may be, if they are labels
    divided: bool = False  # whether the gradient may be divided by a weight after the tree


class Shards:
    """The functions of one shard that are compiled."""

    def __init__(
        self, model: Model, loss: Any, chosen: list[Metric], precision: str | None, keeps_outputs: bool = False
    ) -> None:
        self._model = model
        self._keeps_outputs = keeps_outputs
        self._term = losses.choose_term(loss)
        self._metrics = chosen
        self._short = jnp.bfloat16 if precision == "bf16" else None
        self._calls = loss is None or isinstance(loss, Objective)  # whether the loss gets the whole batch

    def gradient(
        self, form: Form, examples: int, alone: bool, summed: bool, layout: Fields, found: Found
    ) -> Callable[..., Any]:
        """(params, rest, arrays, key, fraction, first) -> (vectors, sums) of one shard."""

        def run(params: Any, rest: Any, arrays: Any, key: Any, fraction: Any, first: Any) -> Any:
            share = Share(examples, fraction, alone, summed)
            gradients, others, sums = self._passed(params, rest, form.filled(arrays), key, share, found)
            vectors = layout.vectors(gradients, others, found.changed, None if alone else fraction, first)
            return jax.tree.map(lambda vector: vector[None], vectors), sums  # (1, length): a row of a round

        return run

    def step(
        self, form: Form, examples: int, summed: bool, layout: Fields, found: Found, update: Callable[..., Any]
    ) -> Callable[..., Any]:
        """(params, rest, optimizer's state, arrays, key) -> ((sums, arrays, the first three one step on), vectors).

        All of a step whose batch is one shard. There is nothing to add, so the gradients go from the pass to `update`
        as they are; the vectors are the leaf that the shard would have given, out of the arrays that came back: by then
        the script may have written something else into its own.
        """

        def run(params: Any, rest: Any, state: Any, arrays: Any, key: Any) -> Any:
            share = Share(examples, 1.0, alone=True, summed=summed)
            gradients, others, sums = self._passed(params, rest, form.filled(arrays), key, share, found)
            vectors = layout.vectors(gradients, others, found.changed, None, True)
            params, state = update(gradients, state, params, None)
            return (sums, arrays, params, layout.kept(rest, others, found.changed), state), vectors

        return run

    def _passed(self, params: Any, rest: Any, batch: Any, key: Any, share: Share, found: Found) -> tuple[Any, Any, Any]:
        """Forward and backward: the gradients, the other variables afterwards, and the sums."""

        def root(params: Any) -> Any:
            model = self._model.bind(self._cast(params), rest, rng.made(key), training=True)
            term = self._term_of(model, batch, share)
            _check(term.root)
            sums = self._measure(term, share, found)
            return self._wide(term.root), (sums, term.contributes, term.gradient_factor, model.others())

        (_, (sums, contributes, factor, others)), gradients = jax.value_and_grad(root, has_aux=True)(params)
        if factor is not None:
            gradients = jax.tree.map(lambda value: _times(value, factor), gradients)
        if contributes is not True:  # a shard without weight gives exact zeros, also where the loss says NaN
            gradients = jax.tree.map(lambda value: jnp.where(contributes, value, 0), gradients)
        found.changed = vector_fields.changed(rest, others)
        return gradients, others, sums

    def sums(self, form: Form, examples: int, summed: bool, found: Found) -> Callable[..., Any]:
        """(params, rest, arrays, key, fraction) -> sums of one shard, without training."""

        def run(params: Any, rest: Any, arrays: Any, key: Any, fraction: Any) -> Any:
            share = Share(examples, fraction, alone=False, summed=summed)
            model = self._model.bind(self._cast(params), rest, rng.made(key), training=False)
            return self._measure(self._term_of(model, form.filled(arrays), share), share, found)

        return run

    def outputs(self, form: Form) -> Callable[..., Any]:
        """(params, rest, arrays, key) -> the model's outputs, without training."""

        def run(params: Any, rest: Any, arrays: Any, key: Any) -> Any:
            model = self._model.bind(self._cast(params), rest, rng.made(key), training=False)
            inputs, named = spread_inputs(form.filled(arrays))
            return self._called(model)(*inputs, **named)

        return run

    def _term_of(self, model: Bound, batch: Any, share: Share) -> Term:
        """The loss of one shard: mixed precision shortens what the model gets, and of no loss the targets."""
        if self._calls:
            return self._term(model, self._cast(batch), share)
        return self._term(self._called(model), batch, share)

    def _called(self, model: Bound) -> Callable[..., Any]:
        """The model, with inputs in the short type and outputs in the wide one."""
        return lambda *inputs, **named: jax.tree.map(self._wide, model(*self._cast(inputs), **self._cast(named)))

    def _measure(self, term: Term, share: Share, found: Found) -> Any:
        """[loss, weight, divided, metric sums ...] of one shard, before the host's scales; outputs and targets."""
        found.labels = term.labels
        parts, columns = measure(array_ops, self._metrics, term, share.examples)
        values = [(each, times) for value, times in parts for each in _scalars(value)]
        found.divided = not (isinstance(term.divided, float) and term.divided == 0.0)  # a traced one may be anything
        found.columns, found.scales = columns, np.array([scale for _, scale in values], np.float64)
        vector = jnp.stack([jax.lax.stop_gradient(value).astype(array_ops.wide()) for value, _ in values])
        return vector, (term.outputs, term.targets) if self._keeps_outputs else None

    def _cast(self, tree: Any) -> Any:
        """Floats in the short type, where mixed precision was asked for."""
        short = self._short
        if short is None:
            return tree
        return jax.tree.map(lambda value: value.astype(short) if _is_float(value) else value, tree)

    def _wide(self, value: Any) -> Any:
        return value.astype(jnp.float32) if self._short is not None and _is_float(value) else value


def _times(gradient: Any, factor: Any) -> Any:
    """A gradient times what its loss could not be multiplied by, in the type in which it will be added."""
    dtype = vector_fields.accumulated(gradient.dtype)
    return gradient.astype(dtype) * jnp.asarray(factor, dtype)


def _scalars(value: Any) -> list[Any]:
    array = jnp.asarray(value)
    return list(jnp.ravel(array)) if array.ndim else [array]


def _is_float(value: Any) -> bool:
    return isinstance(value, jax.Array) and bool(jnp.issubdtype(value.dtype, jnp.floating))


def _check(root: Any) -> None:
    if jnp.ndim(root):
        raise ModelError(f"A loss is one number. Got shape {tuple(root.shape)}. Return its mean.")
    if not _is_float(root):
        raise ModelError(f"A loss is a real number. Got {getattr(root, 'dtype', type(root).__name__)}. Return a float.")
