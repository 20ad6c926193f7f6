"""A model that is a function of its variables: flax.linen, a TrainState, or (apply, variables).

`apply(variables, *inputs)` returns the outputs. If it takes `rngs`, it gets random keys derived from the shard's key.
If it takes `mutable`, it returns (outputs, changed variables). `trainer.model` is a `ModelHandle`, which the script
calls like a module and which has the current variables.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from flax.core import unfreeze
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from lockstep.backends.jax import named_pytrees, rng, shard_inputs, train_mode
from lockstep.backends.jax.compile_cache import CompiledProgram
from lockstep.backends.jax.linen_intermediates import Path, drop_paths, find_paths, update_variables
from lockstep.backends.jax.train_mode import ModuleModes
from lockstep.core.batch_entries import spread_inputs
from lockstep.errors import ModelError

PARAMS = "params"
_OWN_FIELDS = {"step", "apply_fn", "params", "tx", "opt_state"}  # the fields of every TrainState


class FunctionalModel:
    """A model given as a function `apply(variables, *inputs)` and its variables."""

    may_donate = True  # updates may reuse the memory of the arrays, because the script only gets copies
    mode_flags: ModuleModes | None = None

    def __init__(self, apply: Callable[..., Any], variables: Any) -> None:
        self.apply, self.module, self.fixed = _unwrap_apply(apply)
        # Whether the variables are a dict of collections ('params', 'batch_stats', ...), and not the parameters alone.
        self._has_collections = self.module is not None or (isinstance(variables, Mapping) and PARAMS in variables)
        self.params_prefix = "model.params" if self._has_collections else "model"
        self.state: TrainState | None = None  # as it was given to `wrap`
        self.sow_paths: frozenset[Path] = frozenset()  # where `self.sow` stores intermediate values
        self.params: Any = None
        self.rest: Any = {}
        self.handle = ModelHandle(self)
        if variables is not None:
            self._set_variables(variables)

    @classmethod
    def from_module(cls, module: nn.Module) -> "FunctionalModel":
        """Adapts a linen module; if it is not bound to variables, they are initialized from the first batch."""
        if module.scope is None:
            return cls(module.apply, None)
        plain, variables = module.unbind()
        return cls(plain.apply, variables)

    @classmethod
    def from_pair(cls, apply: Any, variables: Any) -> "FunctionalModel":
        """Adapts (apply, variables) or (linen module, variables)."""
        return cls(apply.apply if isinstance(apply, nn.Module) else apply, variables)

    @classmethod
    def from_train_state(cls, state: TrainState) -> "FunctionalModel":
        """Adapts a TrainState; fields that a subclass adds for variables, such as batch_stats, become collections."""
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        if scales := [name for name, value in fields.items() if isinstance(value, DynamicScale)]:
            raise ModelError(
                f"The TrainState has a loss scale {scales[0]!r} for float16, which is not supported on JAX. bfloat16 "
                f"needs none: give lockstep.wrap state.replace({scales[0]}=None) and precision='bf16'."
            )
        added = {
            name: value for name, value in fields.items() if name not in _OWN_FIELDS and isinstance(value, Mapping)
        }
        model = cls(state.apply_fn, {PARAMS: state.params, **added})
        model.state = state
        return model

    def _set_variables(self, variables: Any) -> None:
        """Splits the variables into trained and untrained ones; raises an error if they do not fit."""
        named_pytrees.check_not_donated(variables)
        named_pytrees.check_arrays(variables)
        if not self._has_collections:
            self.params, self.rest = variables, {}
            return
        variables = unfreeze(variables)
        if PARAMS not in variables:
            raise ModelError(
                f"The model's variables need a collection 'params' to train. Got the collections {sorted(variables)}. "
                "Add a collection 'params'."
            )
        self.params = variables[PARAMS]
        self.rest = {name: value for name, value in variables.items() if name != PARAMS}

    def join_variables(self, params: Any, rest: Any) -> Any:
        """Returns the variables as `apply` takes them."""
        return {PARAMS: params, **rest} if self._has_collections else params

    def bind(self, params: Any, rest: Any, key: Any, training: bool) -> "BoundFunction":
        """Binds the function to variables and to a shard's random key, in training or evaluation mode."""
        apply, named = self._select_mode(training)
        accepted = {"rngs", "mutable"} if self.module is not None else train_mode.list_accepted(apply)
        if "rngs" in accepted:
            named["rngs"] = rng.NamedKeys(key)
        mutable = sorted(rest) if training and "mutable" in accepted else []
        if "mutable" in accepted and not mutable:
            named["mutable"] = False
        return BoundFunction(self, apply, named, mutable, (params, rest))

    def _select_mode(self, training: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Returns `apply` in training or evaluation mode, and the keyword arguments with which to call it.

        The mode is an argument of the call or a field of the module.
        """
        if self.module is None:
            name = train_mode.find_argument(self.apply)
            return self.apply, {} if name is None else {name: train_mode.choose_value(name, training)}
        name = train_mode.find_argument(self._find_method())
        if name is not None:
            return self.apply, {**self.fixed, name: train_mode.choose_value(name, training)}
        name = train_mode.find_field(
            {each.name: getattr(self.module, each.name) for each in dataclasses.fields(self.module)}
        )
        if name is None:
            return self.apply, dict(self.fixed)
        clone: Any = self.module.clone
        return clone(**{name: train_mode.choose_value(name, training)}).apply, dict(self.fixed)

    def _find_method(self) -> Callable[..., Any]:
        """Returns the method of the linen module that `apply` calls."""
        method = self.fixed.get("method") or "__call__"
        found: Callable[..., Any] = getattr(type(self.module), method) if isinstance(method, str) else method
        return found

    def create_variables(self, inputs: Any, key: Any) -> None:
        """Initializes a linen module from the first batch's inputs."""
        if self.params is not None:
            return
        assert self.module is not None
        apply, named = self._select_mode(training=False)
        module = apply.__self__  # type: ignore[attr-defined]
        spec, arrays = shard_inputs.split_arrays(inputs)

        def initialize(key: Any, arrays: Any) -> Any:
            arguments, more = spread_inputs(spec.unflatten(arrays))
            return module.init(rng.NamedKeys(key), *arguments, **more, **named)

        def call(variables: Any, key: Any, arrays: Any) -> Any:
            arguments, more = spread_inputs(spec.unflatten(arrays))
            given = {**named, **more, "rngs": rng.NamedKeys(key), "mutable": sorted(variables.keys() - {PARAMS})}
            return module.apply(variables, *arguments, **given)[1]

        # Compiled, and not run eagerly: this is one program instead of one for each operation.
        variables = CompiledProgram(initialize, jax.local_devices()[:1], None)(0, key, arrays)
        self.sow_paths = find_paths(variables, lambda: jax.eval_shape(call, unfreeze(variables), key, arrays))
        self._set_variables(drop_paths(variables, self.sow_paths))

    def update_rest(self, rest: Any, after: dict[str, Any]) -> Any:
        """Returns the untrained variables after a call that has returned `after` as the changed variables.

        Intermediate values that `self.sow` has stored are left out.
        """
        after = jax.tree.map(_to_array, unfreeze(after))
        return {**rest, **(after if self.module is None else update_variables(rest, after, self.sow_paths))}

    def publish(self, params: Any, rest: Any) -> None:
        """Stores the arrays for the script's handle."""
        self.params, self.rest = params, rest

    def read_changes(self) -> bool:
        """Returns False, because the script only has copies of the arrays and cannot replace one."""
        return False

    def list_arrays(self) -> list[Any]:
        """Returns an empty list, because the script only has copies of the arrays."""
        return []

    def read_trace_key(self) -> Any:
        """Returns None, because the function and its module do not change."""
        return None

    def read_attributes(self) -> Any:
        """Returns None, because the model has no attributes that other processes need."""

    def write_attributes(self, attributes: Any) -> None:
        """Does nothing, because the model has no attributes to write."""


class BoundFunction:
    """The model's function inside an executable; each call gets the variables that the previous call returned."""

    def __init__(
        self, model: FunctionalModel, apply: Any, named: Mapping[str, Any], mutable: list[str], variables: Any
    ) -> None:
        self._model = model
        self._apply = apply
        self._named = named
        self._mutable = mutable
        self._params, self._rest = variables

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Returns the outputs, and stores the variables that the call has changed for the next call."""
        named = {**self._named, **named}
        if not self._mutable:
            return self._apply(self.variables, *inputs, **named)
        result = self._apply(self.variables, *inputs, **{**named, "mutable": self._mutable})
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise ModelError(
                f"apply must return (outputs, variables) when called with mutable={self._mutable}, but returned "
                f"{type(result).__name__}. Return both, or remove mutable from its arguments."
            )
        outputs, changed = result
        after = {name: changed[name] for name in self._mutable if name in changed}
        self._rest = self._model.update_rest(self._rest, after)
        return outputs

    @property
    def variables(self) -> Any:
        """The current variables."""
        return self._model.join_variables(self._params, self._rest)

    def read_rest(self) -> Any:
        """Returns the untrained variables after all calls so far."""
        return self._rest


class ModelHandle:
    """`trainer.model` for a model that is a function: a callable object with the current variables."""

    def __init__(self, functional_model: FunctionalModel) -> None:
        self.functional_model = functional_model
        self.optimizer: Any = None  # set by the backend, because `state` contains the optimizer's state

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Returns the outputs with the current variables, in evaluation mode."""
        return self.functional_model.bind(*self._copy_variables(), jax.random.key(0), training=False)(*inputs, **named)

    @property
    def variables(self) -> Any:
        """A copy of the current variables, as `apply` takes them."""
        return self.functional_model.join_variables(*self._copy_variables())

    @property
    def state(self) -> TrainState:
        """The TrainState that was given to `wrap`, with the current values."""
        state = self.functional_model.state
        if state is None:
            raise ModelError("This model was not wrapped as a TrainState, so it has no `state`. Use `variables`.")
        params, rest = self._copy_variables()
        collections = {name: value for name, value in rest.items() if hasattr(state, name)}
        opt_state, step = self.optimizer.copy_state()
        return state.replace(step=step, params=params, opt_state=opt_state, **collections)

    def copy_model(self) -> "ModelHandle":
        """Returns a handle on a copy of the current model, for another trainer."""
        own = self.functional_model
        if own.state is not None:
            return FunctionalModel.from_train_state(self.state).handle
        apply = partial(own.apply, **own.fixed)
        copy = FunctionalModel(apply, None if own.params is None else self.variables)
        copy.sow_paths = own.sow_paths
        return copy.handle

    def _copy_variables(self) -> tuple[Any, Any]:
        """Returns copies of params and rest, because the next step may reuse the memory of the arrays."""
        model = self.functional_model
        if model.params is None:
            raise ModelError(
                "The linen module has no variables yet: they are created from the first batch, also after a checkpoint "
                "was loaded. Train or predict before you read them, e.g. trainer.predict(x[:1])."
            )
        copies: tuple[Any, Any] = named_pytrees.copy_leaves((model.params, model.rest))
        return copies


def _to_array(value: Any) -> Any:
    """Returns a Python number as an array, and an array unchanged."""
    return value if hasattr(value, "shape") else jax.numpy.asarray(value)


def _unwrap_apply(apply: Any) -> tuple[Callable[..., Any], nn.Module | None, dict[str, Any]]:
    """Returns the function to call, the linen module whose `apply` it is (or None), and its fixed arguments.

    A module's `apply` is unwrapped from `jax.jit`, which would trace the mode as an array, and from
    `functools.partial`, but from nothing else, because other wrappers may change the arguments.
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
    train_mode.check_apply(apply)
    return apply, None, {}
