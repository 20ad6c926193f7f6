"""Builds the functions that compute one shard's forward and backward pass on one device.

Every shard is computed alone and in its own shape, without loops over shards and without collectives.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from lockstep.backends.jax import array_ops, flat_vectors, losses, rng
from lockstep.backends.jax.flat_vectors import VectorFields
from lockstep.backends.jax.models import BoundModel, Model
from lockstep.backends.jax.shard_inputs import ShardSpec
from lockstep.core.batch_entries import spread_inputs
from lockstep.core.metrics import Column, Metric
from lockstep.core.objective import Objective
from lockstep.core.outputs import select_outputs
from lockstep.core.shard_sums import measure
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Share, Term
from lockstep.errors import ModelError


@dataclass
class TraceInfo:
    """What tracing a shard's function finds: how the host reads its sums, and which variables the model changes."""

    scales: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    columns: list[Column] = field(default_factory=list)
    changed: tuple[bool, ...] = ()
    labels: Labels | None = None  # the range of the targets, if they are labels
    divided: bool = False  # whether the gradient may have to be divided by a weight after the tree


class ShardPasses:
    """Builds the functions that compute one shard; the caller compiles them."""

    def __init__(
        self, model: Model, loss: Any, metrics: list[Metric], precision: str | None, keeps_outputs: bool = False
    ) -> None:
        self._model = model
        self._keeps_outputs = keeps_outputs
        self._weigh_loss = losses.choose_term(loss)
        self._metrics = metrics
        self._short_dtype = jnp.bfloat16 if precision == "bf16" else None
        self._loss_calls_model = loss is None or isinstance(loss, Objective)

    def build_gradient(
        self, spec: ShardSpec, examples: int, alone: bool, summed: bool, fields: VectorFields, info: TraceInfo
    ) -> Callable[..., Any]:
        """Returns a function that computes one shard's partial sum in training mode.

        It takes (params, rest, arrays, key, fraction, first), and returns the partial sum's vectors and the sums.
        """

        def run(params: Any, rest: Any, arrays: Any, key: Any, fraction: Any, first: Any) -> Any:
            share = Share(examples, fraction, alone, summed)
            gradients, others, sums = self._run_passes(params, rest, spec.unflatten(arrays), key, share, info)
            return fields.pack(gradients, others, info.changed, None if alone else fraction, first), sums

        return run

    def build_step(
        self,
        spec: ShardSpec,
        examples: int,
        summed: bool,
        fields: VectorFields,
        info: TraceInfo,
        update: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Returns a function that makes the whole step of a batch with one shard.

        It takes (params, rest, optimizer state, arrays, key). Its first result is (sums, arrays, new params, new rest,
        new optimizer state), its second the partial sum's vectors. `update` gets the gradients directly, because
        nothing is added. The vectors are computed by a second program when they are read, from the returned
        arrays, because the script may have changed its own arrays by then.
        """

        def run(params: Any, rest: Any, state: Any, arrays: Any, key: Any) -> Any:
            share = Share(examples, 1.0, alone=True, summed=summed)
            gradients, others, sums = self._run_passes(params, rest, spec.unflatten(arrays), key, share, info)
            vectors = fields.pack(gradients, others, info.changed, None, True)
            params, state = update(gradients, state, params, None)
            return (sums, arrays, params, fields.replace_changed(rest, others, info.changed), state), vectors

        return run

    def _run_passes(
        self, params: Any, rest: Any, batch: Any, key: Any, share: Share, info: TraceInfo
    ) -> tuple[Any, Any, Any]:
        """Runs the forward and backward pass; returns the gradients, the untrained variables and the sums."""

        def compute_root(params: Any) -> Any:
            model = self._model.bind(self._cast(params), rest, rng.wrap_key(key), training=True)
            term = self._compute_term(model, batch, share)
            _check_loss(term.root)
            sums = self._measure(term, share, info)
            return self._widen(term.root), (sums, term.contributes, term.gradient_factor, model.read_rest())

        (_, (sums, contributes, factor, others)), gradients = jax.value_and_grad(compute_root, has_aux=True)(params)
        if factor is not None:
            gradients = jax.tree.map(lambda value: _scale_gradient(value, factor), gradients)
        if contributes is not True:  # a shard of weight 0 gives exact zeros, even if its loss is NaN
            gradients = jax.tree.map(lambda value: jnp.where(contributes, value, 0), gradients)
        info.changed = flat_vectors.find_changed(rest, others)
        return gradients, others, sums

    def build_sums(self, spec: ShardSpec, examples: int, summed: bool, info: TraceInfo) -> Callable[..., Any]:
        """Returns a function that computes one shard's sums in evaluation mode, without an update.

        It takes (params, rest, arrays, key, fraction).
        """

        def run(params: Any, rest: Any, arrays: Any, key: Any, fraction: Any) -> Any:
            share = Share(examples, fraction, alone=False, summed=summed)
            model = self._model.bind(self._cast(params), rest, rng.wrap_key(key), training=False)
            return self._measure(self._compute_term(model, spec.unflatten(arrays), share), share, info)

        return run

    def build_outputs(self, spec: ShardSpec) -> Callable[..., Any]:
        """Returns a function of (params, rest, arrays, key) that computes the outputs in evaluation mode."""

        def run(params: Any, rest: Any, arrays: Any, key: Any) -> Any:
            model = self._model.bind(self._cast(params), rest, rng.wrap_key(key), training=False)
            inputs, named = spread_inputs(spec.unflatten(arrays))
            return self._wrap_model(model)(*inputs, **named)

        return run

    def _compute_term(self, model: BoundModel, batch: Any, share: Share) -> Term:
        """Returns one shard's loss.

        In mixed precision a loss that calls the model itself gets the whole batch in bfloat16; another loss gets the
        outputs in float32 and the targets as they are.
        """
        if self._loss_calls_model:
            return self._weigh_loss(model, self._cast(batch), share)
        return self._weigh_loss(self._wrap_model(model), batch, share)

    def _wrap_model(self, model: BoundModel) -> Callable[..., Any]:
        """Returns the model as a function; mixed precision casts its inputs to bfloat16 and its outputs to float32."""
        return lambda *inputs, **named: jax.tree.map(self._widen, model(*self._cast(inputs), **self._cast(named)))

    def _measure(self, term: Term, share: Share, info: TraceInfo) -> Any:
        """Returns [loss, weight, divided, metric sums ...], which the host scales, and its outputs."""
        info.labels = term.labels
        parts, columns = measure(array_ops, self._metrics, term, share.examples)
        values = [(each, times) for value, times in parts for each in _split_scalars(value)]
        # A traced value is not known yet, so it counts as one that needs a division.
        info.divided = not (isinstance(term.divided, float) and term.divided == 0.0)
        info.columns, info.scales = columns, np.array([scale for _, scale in values], np.float64)
        vector = jnp.stack([jax.lax.stop_gradient(value).astype(array_ops.wide()) for value, _ in values])
        return vector, select_outputs(term, self._keeps_outputs)

    def _cast(self, tree: Any) -> Any:
        """Returns the pytree with its floats cast to bfloat16 if the run uses mixed precision."""
        dtype = self._short_dtype
        if dtype is None:
            return tree
        return jax.tree.map(lambda value: value.astype(dtype) if _is_float(value) else value, tree)

    def _widen(self, value: Any) -> Any:
        """Returns a float in float32 if the run uses mixed precision."""
        return value.astype(jnp.float32) if self._short_dtype is not None and _is_float(value) else value


def _scale_gradient(gradient: Any, factor: Any) -> Any:
    """Returns gradient * factor in the dtype in which gradients are added."""
    dtype = flat_vectors.choose_sum_dtype(gradient.dtype)
    return gradient.astype(dtype) * jnp.asarray(factor, dtype)


def _split_scalars(value: Any) -> list[Any]:
    """Returns the elements of an array, or a number, as a list of scalars."""
    array = jnp.asarray(value)
    return list(jnp.ravel(array)) if array.ndim else [array]


def _is_float(value: Any) -> bool:
    return isinstance(value, jax.Array) and bool(jnp.issubdtype(value.dtype, jnp.floating))


def _check_loss(root: Any) -> None:
    """Raises ModelError if the loss is not one float."""
    if jnp.ndim(root):
        raise ModelError(f"The loss must be a scalar. Got an array of shape {tuple(root.shape)}. Return its mean.")
    if not _is_float(root):
        raise ModelError(
            f"The loss must be a floating-point scalar. Got {getattr(root, 'dtype', type(root).__name__)}. Return a "
            "float."
        )
