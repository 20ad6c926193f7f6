"""Applied: a model that is a function of its variables: flax.linen, a TrainState, or (apply, variables).

`apply(variables, *inputs)` gives the outputs; where it takes `rngs`, they come from
the shard's own key, and where it takes `mutable`, what the model keeps comes back
beside the outputs. The script's handle on such a model is `trainer.model`, which
is called like a module and shows the current variables.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from flax.core import unfreeze
from flax.training.train_state import TrainState

from lockstep.backends.jax import batches, linen_sow, named_pytrees, rng, train_mode
from lockstep.backends.jax.compile_cache import Program
from lockstep.backends.jax.train_mode import ModuleModes
from lockstep.core.batch_entries import spread_inputs
from lockstep.errors import ModelError

PARAMS = "params"
_OWN_FIELDS = {"step", "apply_fn", "params", "tx", "opt_state"}  # of every TrainState


class Applied:
    """A function of variables, and those variables."""

    donated = True  # the script sees copies
    mode_flags: ModuleModes | None = None

    def __init__(self, apply: Callable[..., Any], variables: Any) -> None:
        self.apply, self.module, self.fixed = _opened(apply)
        self._collected = self.module is not None or (isinstance(variables, Mapping) and PARAMS in variables)
        self.home = "model.params" if self._collected else "model"
        self.state: TrainState | None = None
        self.sown: frozenset[linen_sow.Path] = frozenset()  # where a linen module has sown when it was made
        self.params: Any = None
        self.rest: Any = {}
        self.handle = Handle(self)
        if variables is not None:
            self._take(variables)

    @classmethod
    def of_module(cls, module: nn.Module) -> "Applied":
        """A linen module: with its variables where it is bound, else with those of the first batch."""
        if module.scope is None:
            return cls(module.apply, None)
        plain, variables = module.unbind()
        return cls(plain.apply, variables)

    @classmethod
    def of_pair(cls, apply: Any, variables: Any) -> "Applied":
        """(apply, variables), or (linen module, variables)."""
        return cls(apply.apply if isinstance(apply, nn.Module) else apply, variables)

    @classmethod
    def of_state(cls, state: TrainState) -> "Applied":
        """A TrainState, whose further fields of variables (batch_stats ...) go along."""
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        kept = {name: value for name, value in fields.items() if name not in _OWN_FIELDS and isinstance(value, Mapping)}
        model = cls(state.apply_fn, {PARAMS: state.params, **kept})
        model.state = state
        return model

    def _take(self, variables: Any) -> None:
        named_pytrees.check_there(variables)
        named_pytrees.named(variables)  # refuses two arrays of one name
        if not self._collected:
            self.params, self.rest = variables, {}
            return
        variables = unfreeze(variables)
        if PARAMS not in variables:
            raise ModelError(f"A model has parameters to train in 'params'. Got {sorted(variables)}.")
        self.params = variables[PARAMS]
        self.rest = {name: value for name, value in variables.items() if name != PARAMS}

    def variables(self, params: Any, rest: Any) -> Any:
        """What `apply` is called with."""
        return {PARAMS: params, **rest} if self._collected else params

    def bind(self, params: Any, rest: Any, key: Any, training: bool) -> "BoundApply":
        """The function with these variables and a shard's own key."""
        apply, named = self._in_mode(training)
        taken = {"rngs", "mutable"} if self.module is not None else train_mode.accepted(apply)
        if "rngs" in taken:
            named["rngs"] = rng.Streams(key)
        mutable = sorted(rest) if training and "mutable" in taken else []
        if "mutable" in taken and not mutable:
            named["mutable"] = False
        return BoundApply(self, apply, named, mutable, (params, rest))

    def _in_mode(self, training: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function, and how it is told the mode: by an argument of the call, else by a field of the module."""
        if self.module is None:
            name = train_mode.argument(self.apply)
            return self.apply, {} if name is None else {name: train_mode.value(name, training)}
        name = train_mode.argument(self._method())
        if name is not None:
            return self.apply, {**self.fixed, name: train_mode.value(name, training)}
        name = train_mode.field(
            {each.name: getattr(self.module, each.name) for each in dataclasses.fields(self.module)}
        )
        if name is None:
            return self.apply, dict(self.fixed)
        clone: Any = self.module.clone
        return clone(**{name: train_mode.value(name, training)}).apply, dict(self.fixed)

    def _method(self) -> Callable[..., Any]:
        """The method of the linen module that is called."""
        method = self.fixed.get("method") or "__call__"
        found: Callable[..., Any] = getattr(type(self.module), method) if isinstance(method, str) else method
        return found

    def start(self, inputs: Any, key: Any) -> None:
        """Initializes a linen module from the first batch's inputs."""
        if self.params is not None:
            return
        assert self.module is not None
        apply, named = self._in_mode(training=False)
        module = apply.__self__  # type: ignore[attr-defined]
        form, arrays = batches.split(inputs)

        def made(key: Any, arrays: Any) -> Any:
            arguments, more = spread_inputs(form.filled(arrays))
            return module.init(rng.Streams(key), *arguments, **more, **named)

        def again(variables: Any, key: Any, arrays: Any) -> Any:
            arguments, more = spread_inputs(form.filled(arrays))
            given = {**named, **more, "rngs": rng.Streams(key), "mutable": sorted(variables.keys() - {PARAMS})}
            return module.apply(variables, *arguments, **given)[1]

        variables = Program(made, jax.local_devices()[:1], None)(0, key, arrays)  # once in a process
        self.sown = linen_sow.paths(variables, lambda: jax.eval_shape(again, unfreeze(variables), key, arrays))
        self._take(linen_sow.without(variables, self.sown))

    def kept(self, rest: Any, after: dict[str, Any]) -> Any:
        """The other variables after a call that gave these; what a linen module has sown is none."""
        after = jax.tree.map(_array, unfreeze(after))
        return {**rest, **(after if self.module is None else linen_sow.kept(rest, after, self.sown))}

    def publish(self, params: Any, rest: Any) -> None:
        """Keeps them for the script's handle."""
        self.params, self.rest = params, rest

    def changed(self) -> bool:
        """The script holds copies, so never."""
        return False

    def held(self) -> list[Any]:
        """Nothing that the script could write to."""
        return []

    def signature(self) -> Any:
        """A function and its module do not change."""
        return None

    def controls(self) -> Any:
        """Nothing."""

    def turn(self, controls: Any) -> None:
        """There is nothing to turn."""


class BoundApply:
    """The function inside an executable; calls in turn see what the earlier ones have kept."""

    def __init__(
        self, model: Applied, apply: Callable[..., Any], named: Mapping[str, Any], mutable: list[str], variables: Any
    ) -> None:
        self._model = model
        self._apply = apply
        self._named = named
        self._mutable = mutable
        self._params, self._rest = variables

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The outputs; what the model keeps is remembered."""
        named = {**self._named, **named}
        if not self._mutable:
            return self._apply(self.variables, *inputs, **named)
        result = self._apply(self.variables, *inputs, **{**named, "mutable": self._mutable})
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise ModelError(
                f"With mutable={self._mutable} apply gives (outputs, variables). Got {type(result).__name__}. "
                "Return both, or leave mutable out of its arguments."
            )
        outputs, kept = result
        self._rest = self._model.kept(self._rest, {name: kept[name] for name in self._mutable if name in kept})
        return outputs

    @property
    def variables(self) -> Any:
        """The variables as they are now."""
        return self._model.variables(self._params, self._rest)

    def others(self) -> Any:
        """What the model keeps, as the calls have left it."""
        return self._rest


class Handle:
    """What `trainer.model` is for such a model: callable, up to date, and it shows its variables."""

    def __init__(self, applied: Applied) -> None:
        self.applied = applied
        self.optimizer: Any = None  # set by the backend, for `state`

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The outputs with the current variables, without training."""
        return self.applied.bind(*self._current(), jax.random.key(0), training=False)(*inputs, **named)

    @property
    def variables(self) -> Any:
        """A copy of the current variables, as `apply` takes them."""
        return self.applied.variables(*self._current())

    @property
    def state(self) -> TrainState:
        """The TrainState that was given to `wrap`, up to date."""
        state = self.applied.state
        if state is None:
            raise ModelError("`state` is a TrainState's. This model is none: use `variables`.")
        params, rest = self._current()
        kept = {name: value for name, value in rest.items() if hasattr(state, name)}
        opt_state, step = self.optimizer.current()
        return state.replace(step=step, params=params, opt_state=opt_state, **kept)

    def again(self) -> "Handle":
        """A handle on a copy of the model as it is now, for another trainer."""
        given = self.applied
        if given.state is not None:
            return Applied.of_state(self.state).handle
        apply = partial(given.apply, **given.fixed)
        other = Applied(apply, None if given.params is None else self.variables)
        other.sown = given.sown
        return other.handle

    def _current(self) -> tuple[Any, Any]:
        if self.applied.params is None:
            raise ModelError(
                "A linen module has its variables from the first batch on, also where a state was restored. Train or "
                "evaluate first; trainer.predict(x[:1]) is enough."
            )
        current: tuple[Any, Any] = named_pytrees.copied((self.applied.params, self.applied.rest))
        return current


def _array(value: Any) -> Any:
    """A plain number as an array; an array as the object that it is."""
    return value if hasattr(value, "shape") else jax.numpy.asarray(value)


def _opened(apply: Any) -> tuple[Callable[..., Any], nn.Module | None, dict[str, Any]]:
    """What is called, the linen module whose `apply` it is, and the arguments that are fixed for it.

    A module's `apply` may stand inside of `jax.jit`, which would take the mode for an array, and of
    `functools.partial`. Inside of anything else, which may do what it likes with its arguments, it is not looked for.
    """
    inner: Any = apply
    fixed: dict[str, Any] = {}
    while True:
        if isinstance(inner, partial) and not inner.args:
            inner, fixed = inner.func, {**inner.keywords, **fixed}
        elif isinstance(inner, jax.stages.Wrapped) and hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            break
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(inner, "__name__", "") == "apply":
        return inner, owner, fixed
    if train_mode.takes_any(apply):
        raise ModelError(
            "The mode, rngs and mutable are given to an apply that names them. Got one with **. Write for example "
            "apply(variables, x, *, train, rngs, mutable); where it needs none of them, "
            "lambda variables, x: apply(variables, x)."
        )
    return apply, None, {}
