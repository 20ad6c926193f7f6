"""Optimizers: an optax transformation and its state, alone, in an `nnx.Optimizer` or in a TrainState."""

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

_RATE = "learning_rate"  # optax's word; Lockstep's is lr


class Optimizer:
    """An optax transformation, and its state as a nest of arrays (None before the parameters are known)."""

    _asks: bool | None = None  # for the loss; known once it was traced

    def __init__(self, tx: Any, state: Any = None, owner: Any = None, steps: int | None = None) -> None:
        many = isinstance(tx, optax.MultiSteps)  # whose own way to a transformation leaves the loss out
        self.tx = optax.GradientTransformationExtraArgs(tx.init, tx.update) if many else tx
        told = isinstance(self.tx, optax.GradientTransformationExtraArgs)  # others are given three arguments
        self._hears = told and _takes(self.tx.update, "value")
        self.state = state
        self.steps = steps  # made so far, where the script's own object counts them
        self._owner: nnx.Optimizer[Any] | None = owner
        self._wanted: Sequence[Mapping[str, Any]] = ()  # numbers set before there was a state
        self._published = self._held()

    @property
    def donated(self) -> bool:
        """Whether nobody else holds the state, so that an update may use its memory."""
        return self._owner is None

    def stepped(self, gradients: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
        """The parameters and the state one step on, inside an executable."""
        told = {"value": loss} if self._hears else {}
        updates, state = self.tx.update(gradients, state, params, **told)
        return optax.apply_updates(params, updates), state

    def start(self, params: Any) -> None:
        """Makes the state for these parameters, where there is none yet."""
        if self.state is None:
            self.state = self.tx.init(
                jax.tree.map(
                    lambda leaf: leaf if named_pytrees.is_key(leaf) else jnp.asarray(named_pytrees.numbers(leaf)),
                    params,
                )
            )
            if self._wanted:
                self.state = self.with_numbers(self._wanted)

    def asks_for_loss(self, params: Any) -> bool:
        """Whether the transformation looks at the step's loss, as one that reduces on a plateau does.

        Found out once, by tracing it; so is whether it can make a step at all.
        """
        if self._asks is None:
            traced, (_, after) = self._traced(params)
            _check_kept(self.state, after)
            loss = traced.invars[0]
            read = [*traced.outvars, *(variable for line in traced.eqns for variable in line.invars)]
            self._asks = any(variable is loss for variable in read)
        return self._asks

    def _traced(self, params: Any) -> tuple[Any, Any]:
        """An update as JAX sees it, the loss its first argument, and the forms of what comes out."""

        def update(loss: Any, params: Any, state: Any) -> Any:
            return self.stepped(params, state, params, loss)

        try:
            traced, forms = jax.make_jaxpr(update, return_shape=True)(0.0, params, self.state)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise OptimizerError(
                f"A step gives its optimizer gradient, parameters and loss. This one asks for more: {error}. "
                "Use one without a line search, such as optax.adam(1e-3)."
            ) from error
        return traced.jaxpr, forms

    def publish(self, state: Any, steps: int | None) -> None:
        """Keeps the state, and brings the script's own optimizer up to date."""
        self.state, self.steps = state, steps
        if self._owner is not None:
            leaves = jax.tree.leaves(state)
            for variable, leaf in zip(_variables(self._owner), leaves, strict=True):
                variable.set_raw_value(leaf, _unsafe_bypass_check=True)
            self._owner.step.set_raw_value(jax.numpy.asarray(steps, jax.numpy.uint32), _unsafe_bypass_check=True)
        self._published = self._held()

    def changed(self) -> bool:
        """Whether the script has put other arrays into its optimizer since they were published; takes them over."""
        held = self._held()
        if all(one is other for one, other in zip(held, self._published, strict=True)):
            return False
        assert self._owner is not None
        self.state, self.steps = nnx.as_pure(self._owner.opt_state), int(self._owner.step[...])
        self._published = held
        return True

    def current(self) -> tuple[Any, int | None]:
        """A copy of the state, and the number of steps."""
        return named_pytrees.copied(self.state), self.steps

    def held(self) -> list[Any]:
        """The arrays in the script's own optimizer, without the numbers that `controls` carry."""
        if self._owner is None:
            return []
        numbers = {id(value) for each in _injected(self._owner.opt_state) for value in each.values()}
        return [each.get_raw_value() for each in _variables(self._owner) if id(each) not in numbers]

    # -- plain numbers

    def numbers(self) -> list[dict[str, Any]]:
        """The numbers of every `optax.inject_hyperparams`; what is baked into functions cannot be told."""
        if self._wanted and self.state is None:
            return [dict(group) for group in self._wanted]
        return [
            {
                "lr" if name == _RATE else name: np.asarray(value).item()
                for name, value in each.items()
                if np.ndim(value) == 0
            }
            for each in _injected(self._present())
        ]

    def numbers_in(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The same numbers as a state by names has them, before the parameters are known."""
        present = self._present()
        names = {id(leaf): f"optimizer.{name}" for name, leaf in named_pytrees.named(present).items()}
        return [
            {
                "lr" if name == _RATE else name: state[names[id(value)]].data.item()
                for name, value in each.items()
                if np.ndim(value) == 0 and names[id(value)] in state
            }
            for each in _injected(present)
        ]

    def with_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> Any:
        """The state with other numbers, in the types that were there."""
        groups = self.numbers()
        if numbers and not groups:
            raise _baked(next(iter(numbers[0]), "lr"))
        if len(numbers) != len(groups):
            raise StateError(
                f"The state does not fit this optimizer. It has {len(numbers)} groups of numbers, the optimizer "
                f"{len(groups)}. Use the same optimizer."
            )
        for group, values in zip(groups, numbers, strict=True):
            for name in values:
                if name not in group:
                    raise _baked(name)
        fresh = iter(numbers)

        def renewed(node: Any) -> Any:
            if not _is_injected(node):
                return node
            values = {_RATE if name == "lr" else name: value for name, value in next(fresh).items()}
            old = dict(node.hyperparams)
            new = {
                name: np.asarray(values.get(name, named_pytrees.host(value)), value.dtype)
                for name, value in old.items()
            }
            return node._replace(
                hyperparams=new, inner_state=jax.tree.map(renewed, node.inner_state, is_leaf=_is_injected)
            )

        return jax.tree.map(renewed, self._present(), is_leaf=_is_injected)

    def want(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Keeps numbers for the state that the first batch will bring."""
        self.with_numbers(numbers)  # refuses what does not fit
        self._wanted = [{**old, **new} for old, new in zip(self.numbers(), numbers, strict=True)]

    def _present(self) -> Any:
        """The state, or before the parameters are known that of none: the numbers in it are the same."""
        if self.state is not None:
            return self.state
        try:
            return self.tx.init({})
        except (ValueError, TypeError, KeyError):  # it has a label for every parameter: nothing can be told yet
            return ()

    def _held(self) -> list[Any]:
        return [] if self._owner is None else [variable.get_raw_value() for variable in _variables(self._owner)]


def of(optimizer: Any, state: Any) -> Optimizer:
    """The optimizer behind whatever the script gave to `wrap`; `state` is its TrainState, if there is one."""
    if state is not None:
        return _of_state(state, optimizer)
    if isinstance(optimizer, nnx.Optimizer):
        _check_own(optimizer.update)
        return Optimizer(optimizer.tx, nnx.as_pure(optimizer.opt_state), optimizer, int(optimizer.step[...]))
    if isinstance(optimizer, optax.GradientTransformation | optax.MultiSteps):
        return Optimizer(optimizer)
    if isinstance(optimizer, Optimizer):  # of a framework on top of JAX
        return optimizer
    raise OptimizerError(
        f"A JAX model goes with an optax optimizer. Got {type(optimizer).__name__}. "
        "Use for example optax.adam(1e-3), or nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)."
    )


def _of_state(state: TrainState, other: Any) -> Optimizer:
    if other is not None:
        raise OptimizerError(
            f"A TrainState brings its optimizer. Got it and {type(other).__name__}. Give wrap None as the optimizer, "
            "or instead of the state (state.apply_fn, {'params': state.params})."
        )
    _check_own(state.apply_gradients)
    slots = jax.tree.map(unfreeze, state.opt_state, is_leaf=lambda node: isinstance(node, FrozenDict))
    return Optimizer(state.tx, slots, steps=int(state.step))


def _check_own(method: Any) -> None:
    """Refuses a class of the script's own that does something else than flax's; only `tx` is run."""
    if not method.__module__.startswith("flax."):
        raise OptimizerError(
            f"A step is made by `tx`. Got a class with its own {method.__qualname__}, which "
            "would not be called. Put what it does into tx, an optax transformation."
        )


def wrt(optimizer: Any) -> Any:
    """The variables that an nnx.Optimizer trains; None where the optimizer does not say."""
    return optimizer.wrt if isinstance(optimizer, nnx.Optimizer) else None


def _takes(update: Any, name: str) -> bool:
    """Whether a function can be given an argument of this name."""
    parameters = inspect.signature(update).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _check_kept(before: Any, after: Any) -> None:
    """Refuses a transformation after whose update the state has another form."""
    old, new = ({name: _form(leaf) for name, leaf in named_pytrees.named(tree).items()} for tree in (before, after))
    for name in old | new:
        if old.get(name) != new.get(name):
            raise OptimizerError(
                f"An optimizer's state keeps its form. After an update there is {new.get(name, 'nothing')} at "
                f"{name!r}, where {old.get(name, 'nothing')} was. Let its init give what its update gives."
            )


def _form(leaf: Any) -> str:
    return f"{tuple(np.shape(leaf))} of {jnp.result_type(leaf)}"


def _injected(state: Any) -> Iterator[Mapping[str, Any]]:
    """The numbers of every state of `optax.inject_hyperparams` in an optimizer's state, outer ones first."""
    for node in jax.tree.leaves(state, is_leaf=_is_injected):
        if _is_injected(node):
            yield node.hyperparams
            yield from _injected(node.inner_state)


def _is_injected(node: Any) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def _variables(owner: Any) -> list[Any]:
    """The variables of its state that hold an array; of a masked parameter there is one without."""
    found = jax.tree.leaves(owner.opt_state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [variable for variable in found if jax.tree.leaves(variable.get_raw_value())]


def _baked(name: str) -> OptimizerError:
    return OptimizerError(
        f"optax keeps its numbers inside functions, where {name!r} can be neither read nor set. Use "
        "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), or an optax schedule."
    )
