"""optax transformations with their states: given alone, in an `nnx.Optimizer` or in a TrainState."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.core import FrozenDict, unfreeze
from flax.training.train_state import TrainState

from lockstep.backends.jax import named_pytrees
from lockstep.errors import OptimizerError, StateError

_RATE = "learning_rate"  # the name in optax; Lockstep calls it lr


class Optimizer:
    """An optax transformation, and its state as a pytree (None before the parameters exist)."""

    _needs_loss: bool | None = None  # None until an update was traced

    def __init__(self, tx: Any, state: Any = None, owner: Any = None, steps: int | None = None) -> None:
        # MultiSteps is no transformation, and what its `gradient_transformation()` returns does not pass the loss on.
        is_multi_steps = isinstance(tx, optax.MultiSteps)
        self.tx = optax.GradientTransformationExtraArgs(tx.init, tx.update) if is_multi_steps else tx
        takes_more = isinstance(self.tx, optax.GradientTransformationExtraArgs)  # others take three arguments only
        self._passes_loss = takes_more and _accepts(self.tx.update, "value")
        self.state = state
        self.steps = steps  # the number of steps so far, if the script's object counts them
        self._owner: nnx.Optimizer[Any] | None = owner
        self._deferred_hyperparams: Sequence[Mapping[str, Any]] = ()  # set before the state exists
        self._published = self._list_arrays()

    @property
    def may_donate(self) -> bool:
        """Whether an update may reuse the memory of the state, because the script has no reference to it."""
        return self._owner is None

    def compute_step(self, gradients: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
        """Returns the parameters and the state after a step; called inside an executable."""
        extra = {"value": loss} if self._passes_loss else {}
        updates, state = self.tx.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    def create_state(self, params: Any) -> None:
        """Initializes the optimizer state for these parameters, if there is none yet."""
        if self.state is None:
            self.state = self.tx.init(
                jax.tree.map(
                    lambda leaf: leaf if named_pytrees.is_key(leaf) else jnp.asarray(named_pytrees.to_numpy(leaf)),
                    params,
                )
            )
            if self._deferred_hyperparams:
                self.state = self.replace_hyperparams(self._deferred_hyperparams)

    def uses_loss(self, params: Any) -> bool:
        """Returns whether the transformation reads the step's loss, as `reduce_on_plateau` does.

        Traces an update once, which also checks that the transformation works with what a step gives it.
        """
        if self._needs_loss is None:
            traced, (_, after) = self._trace(params)
            _check_same_structure(self.state, after)
            # `cond` and `jit` have the loss among their inputs, too, so the equations of the outer level are enough.
            loss = traced.invars[0]
            read = [*traced.outvars, *(variable for line in traced.eqns for variable in line.invars)]
            self._needs_loss = any(variable is loss for variable in read)
        return self._needs_loss

    def _trace(self, params: Any) -> tuple[Any, Any]:
        """Traces an update; returns its jaxpr, whose first input is the loss, and its results' shapes and dtypes."""

        def update(loss: Any, params: Any, state: Any) -> Any:
            return self.compute_step(params, state, params, loss)  # gradients have the shapes of the parameters

        try:
            traced, forms = jax.make_jaxpr(update, return_shape=True)(0.0, params, self.state)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise OptimizerError(
                f"The optimizer needs more than the gradient, the parameters and the loss: {error}. "
                "Use an optimizer without a line search, such as optax.adam(1e-3)."
            ) from error
        return traced.jaxpr, forms

    def publish(self, state: Any, steps: int | None) -> None:
        """Stores the state, and writes it into the script's optimizer."""
        self.state, self.steps = state, steps
        if self._owner is not None:
            leaves = jax.tree.leaves(state)
            for variable, leaf in zip(_list_variables(self._owner), leaves, strict=True):
                variable.set_raw_value(leaf, _unsafe_bypass_check=True)
            self._owner.step.set_raw_value(jax.numpy.asarray(steps, jax.numpy.uint32), _unsafe_bypass_check=True)
        self._published = self._list_arrays()

    def read_changes(self) -> bool:
        """Reads the arrays that the script has replaced since `publish`; returns whether it has replaced any."""
        present = self._list_arrays()
        if all(one is other for one, other in zip(present, self._published, strict=True)):
            return False
        assert self._owner is not None
        self.state, self.steps = nnx.as_pure(self._owner.opt_state), int(self._owner.step[...])
        self._published = present
        return True

    def copy_state(self) -> tuple[Any, int | None]:
        """Returns a copy of the state, whose memory no later step reuses, and the number of steps."""
        return named_pytrees.copy_leaves(self.state), self.steps

    def list_arrays(self) -> list[Any]:
        """Returns the arrays in the script's optimizer except the hyperparameters, which `read_hyperparams` returns."""
        if self._owner is None:
            return []
        hyperparams = {id(value) for each in _iterate_hyperparams(self._owner.opt_state) for value in each.values()}
        return [each.get_raw_value() for each in _list_variables(self._owner) if id(each) not in hyperparams]

    # -- hyperparameters

    def read_hyperparams(self) -> list[dict[str, Any]]:
        """Returns the scalar hyperparameters of every `optax.inject_hyperparams`; optax hides others in closures."""
        if self._deferred_hyperparams and self.state is None:
            return [dict(group) for group in self._deferred_hyperparams]
        return [
            {
                "lr" if name == _RATE else name: np.asarray(value).item()
                for name, value in each.items()
                if np.ndim(value) == 0
            }
            for each in _iterate_hyperparams(self._read_state())
        ]

    def read_saved_hyperparams(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns what `read_hyperparams` returns, but from a saved state, before the parameters exist."""
        present = self._read_state()
        names = {id(leaf): f"optimizer.{name}" for name, leaf in named_pytrees.name_leaves(present).items()}
        return [
            {
                "lr" if name == _RATE else name: state[names[id(value)]].data.item()
                for name, value in each.items()
                if np.ndim(value) == 0 and names[id(value)] in state
            }
            for each in _iterate_hyperparams(present)
        ]

    def replace_hyperparams(self, groups: Sequence[Mapping[str, Any]]) -> Any:
        """Returns the state with these hyperparameters instead of its own, converted to their present types."""
        present = self.read_hyperparams()
        if groups and not present:
            raise _create_fixed_error(next(iter(groups[0]), "lr"))
        if len(groups) != len(present):
            raise StateError(
                f"The state does not fit this optimizer: it has {len(groups)} groups of hyperparameters, and the "
                f"optimizer has {len(present)}. Use the optimizer that the state was saved with."
            )
        for old, new in zip(present, groups, strict=True):
            for name in new:
                if name not in old:
                    raise _create_fixed_error(name)
        remaining = iter(groups)

        def replace(node: Any) -> Any:
            if not _is_injected(node):
                return node
            # The outer group before the groups inside, which is the order of `_iterate_hyperparams`.
            values = {_RATE if name == "lr" else name: value for name, value in next(remaining).items()}
            old = dict(node.hyperparams)
            new = {
                name: np.asarray(values.get(name, named_pytrees.select_copy(value)), value.dtype)
                for name, value in old.items()
            }
            return node._replace(
                hyperparams=new, inner_state=jax.tree.map(replace, node.inner_state, is_leaf=_is_injected)
            )

        return jax.tree.map(replace, self._read_state(), is_leaf=_is_injected)

    def defer_hyperparams(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Stores hyperparameters, which are set when the first batch initializes the state."""
        self.replace_hyperparams(groups)  # for its checks alone: raises if they do not fit
        self._deferred_hyperparams = [{**old, **new} for old, new in zip(self.read_hyperparams(), groups, strict=True)]

    def _read_state(self) -> Any:
        """Returns the state; before the parameters exist, a state for no parameters, with the same hyperparameters."""
        if self.state is not None:
            return self.state
        try:
            return self.tx.init({})
        except (ValueError, TypeError, KeyError):  # e.g. `multi_transform` with a label for every parameter
            return ()

    def _list_arrays(self) -> list[Any]:
        return [] if self._owner is None else [variable.get_raw_value() for variable in _list_variables(self._owner)]


def adapt_optimizer(optimizer: Any, state: Any) -> Optimizer:
    """Adapts the optimizer that the script gave to `wrap`; `state` is the script's TrainState, if there is one."""
    if state is not None:
        return _adapt_train_state(state, optimizer)
    if isinstance(optimizer, nnx.Optimizer):
        _check_update_method(optimizer.update)
        return Optimizer(optimizer.tx, nnx.as_pure(optimizer.opt_state), optimizer, int(optimizer.step[...]))
    if isinstance(optimizer, optax.GradientTransformation | optax.MultiSteps):
        return Optimizer(optimizer)
    if isinstance(optimizer, Optimizer):  # of a framework on top of JAX, such as Keras
        return optimizer
    raise OptimizerError(
        f"A JAX model needs an optax optimizer. Got {type(optimizer).__name__}. "
        "Use e.g. optax.adam(1e-3), or nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)."
    )


def _adapt_train_state(state: TrainState, other: Any) -> Optimizer:
    if other is not None:
        raise OptimizerError(
            f"A TrainState already contains its optimizer, but wrap() was also given {type(other).__name__}. Use "
            "wrap(state, None, ...), or pass (state.apply_fn, {'params': state.params}) as the model."
        )
    _check_update_method(state.apply_gradients)
    # Unfrozen like the parameters, because optax needs the same kinds of containers in both.
    opt_state = jax.tree.map(unfreeze, state.opt_state, is_leaf=lambda node: isinstance(node, FrozenDict))
    return Optimizer(state.tx, opt_state, steps=int(state.step))


def _check_update_method(method: Any) -> None:
    """Raises OptimizerError if a subclass overrides flax's update method, because Lockstep only calls `tx`."""
    if not method.__module__.startswith("flax."):
        raise OptimizerError(
            f"{method.__qualname__} would not be called, because a step only calls the optax transformation `tx`. "
            "Do what this method does in tx, e.g. with optax.chain."
        )


def find_wrt(optimizer: Any) -> Any:
    """Returns the filter of the variables that an nnx.Optimizer trains; None for other optimizers."""
    return optimizer.wrt if isinstance(optimizer, nnx.Optimizer) else None


def _accepts(update: Any, name: str) -> bool:
    """Returns whether a function accepts an argument of this name."""
    parameters = inspect.signature(update).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _check_same_structure(before: Any, after: Any) -> None:
    """Raises OptimizerError if an update changes the shape or type of an array of the state."""
    old, new = (
        {name: _describe(leaf) for name, leaf in named_pytrees.name_leaves(tree).items()} for tree in (before, after)
    )
    for name in old | new:
        if old.get(name) != new.get(name):
            raise OptimizerError(
                f"The optimizer's update changes the shape or type of its state: {name!r} is "
                f"{old.get(name, 'missing')} after init and {new.get(name, 'missing')} after an update. Change init or "
                "update so that they agree."
            )


def _describe(leaf: Any) -> str:
    return f"{tuple(np.shape(leaf))} of {jnp.result_type(leaf)}"


def _iterate_hyperparams(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the hyperparameters of every `optax.inject_hyperparams` in an optimizer's state, outer ones first."""
    for node in jax.tree.leaves(state, is_leaf=_is_injected):
        if _is_injected(node):
            yield node.hyperparams
            yield from _iterate_hyperparams(node.inner_state)


def _is_injected(node: Any) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def _list_variables(owner: Any) -> list[Any]:
    """Returns an nnx optimizer's state variables that contain an array; those of masked parameters contain none."""
    variables = jax.tree.leaves(owner.opt_state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [variable for variable in variables if jax.tree.leaves(variable.get_raw_value())]


def _create_fixed_error(name: str) -> OptimizerError:
    """Returns the error for a hyperparameter that optax does not store in the optimizer state."""
    return OptimizerError(
        f"{name!r} cannot be read or set, because optax stores it inside a function. Use "
        "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), or an optax schedule."
    )
