"""A `flax.nnx.Module` as a model: a module that contains its own variables.

A shard runs a copy of the module's graph, never the script's module. After every step the new arrays are written into
the module's variables. An array that the script has written since then is detected by its identity.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from lockstep.backends.jax import named_pytrees, train_mode
from lockstep.backends.jax.nnx_attributes import NnxAttributes
from lockstep.errors import ModelError, OptimizerError


class NnxModel:
    """An nnx module with its trained and untrained variables."""

    params_prefix = "model"
    may_donate = False  # updates must not reuse the memory of the arrays, which the script's module contains, too

    def __init__(self, module: nnx.Module, wrt: Any) -> None:
        self._module = module
        self._wrt = wrt
        self._attributes = NnxAttributes(module)
        self.mode_flags: train_mode.ModuleModes | None = train_mode.ModuleModes(module)
        self._variables = _find_variables(module)
        self._published: list[Any] = []
        self._read_variables()

    def _read_variables(self) -> None:
        """Reads the module's variables, except random number generators and intermediate values."""
        parts: Any = nnx.split(self._module, self._wrt, (nnx.RngState, nnx.Intermediate), ...)
        _, params, _, rest = parts
        self.params, self.rest = nnx.as_pure(params), nnx.as_pure(rest)
        self._names = [*named_pytrees.name_leaves(self.params), *named_pytrees.name_leaves(self.rest)]
        self._owners, self._empty = self._find_owners(params, rest)
        self._published = self.list_arrays()

    def _find_owners(self, *states: Any) -> tuple[list[Any], list[Any]]:
        """Returns the variable or plain attribute that contains each array, and the variables that contain None."""
        nodes = dict(nnx.iter_graph(self._module))
        owners, empty = [], []
        for path in (path for state in states for path, _ in nnx.to_flat_state(state)):
            variable = self._variables.get(path)
            if variable is None:
                owners.append(_AttributeVariable(nodes[path[:-1]], path[-1]))
            elif variable.get_raw_value() is None:
                empty.append(variable)
                self._names.append(named_pytrees.join_path(path))
            elif jax.tree_util.treedef_is_leaf(jax.tree.structure(variable.get_raw_value())):  # it is one array
                owners.append(variable)
            else:
                kind = type(variable.get_raw_value()).__name__
                raise ModelError(
                    f"The variable {named_pytrees.join_path(path)!r} contains a {kind}, but a variable must contain "
                    "one array. Use one variable for each array."
                )
        return owners, empty

    def bind(self, params: Any, rest: Any, key: Any, training: bool) -> "BoundModule":
        """Returns a copy of the module with these variables and a shard's keys."""
        module = nnx.merge(*_copy_graph(self._module, training), copy=True)
        nnx.update(module, params)
        nnx.update(module, rest)
        # Each random stream starts from a key of its own and with its counter at 0, whatever the module's streams have
        # drawn before, so that a shard's random numbers follow from its own key alone.
        streams = _find_variables(module, nnx.RngState).values()
        for index, variable in enumerate(streams):
            old = variable.get_raw_value()
            if isinstance(variable, nnx.RngKey):
                new = jax.random.fold_in(key, index)
                variable.set_raw_value(jax.random.split(new, old.shape) if old.shape else new)
            else:
                variable.set_raw_value(jax.numpy.zeros(old.shape, old.dtype))
        named: dict[str, Any] = {}
        if callable(module):
            name = train_mode.find_argument(module)
            named = {} if name is None else {name: train_mode.choose_value(name, training)}
            if _needs_rngs(module, bool(streams)):
                named["rngs"] = nnx.Rngs(jax.random.fold_in(key, len(streams)))
        return BoundModule(module, named, rest)

    def create_variables(self, inputs: Any, key: Any) -> None:
        """Does nothing, because an nnx module has its variables when it is created."""

    def publish(self, params: Any, rest: Any) -> None:
        """Writes the arrays into the script's variables."""
        self.params, self.rest = params, rest
        for owner, leaf in zip(self._owners, [*jax.tree.leaves(params), *jax.tree.leaves(rest)], strict=True):
            owner.set_raw_value(leaf, _unsafe_bypass_check=True)
        self._published = self.list_arrays()

    def read_changes(self) -> bool:
        """Reads the arrays that the script has replaced since `publish`; returns whether it has replaced any."""
        present = self.list_arrays()
        if all(one is other for one, other in zip(present, self._published, strict=True)):
            return False
        for name, old, new in zip(self._names, self._published, present, strict=True):
            if _describe(old) != _describe(new):
                raise ModelError(
                    f"The variable {name!r} was changed from {_describe(old)} to {_describe(new)}, but must keep its "
                    "shape and type. Write an array of the same shape and type, or call lockstep.wrap again."
                )
        self._read_variables()
        return True

    def read_trace_key(self) -> Any:
        """Returns the scalars and strings of every module; raises if another attribute was replaced."""
        return self._attributes.read()

    def read_attributes(self) -> Any:
        """Returns the scalars and strings of every module, for other processes."""
        return self._attributes.read()

    def write_attributes(self, attributes: Any) -> None:
        """Writes another process's scalars and strings into the script's module."""
        self._attributes.write(attributes)

    def list_arrays(self) -> list[Any]:
        """Returns the arrays in the script's variables."""
        return [owner.get_raw_value() for owner in (*self._owners, *self._empty)]


class _AttributeVariable:
    """An array in a module's attribute, or in a dict or list there, with the methods of an nnx variable."""

    def __init__(self, node: Any, key: Any) -> None:
        is_attribute = isinstance(node, nnx.Pytree)
        self._container: Any = vars(node) if is_attribute else node
        self._key: Any = str(key) if is_attribute else key

    def get_raw_value(self) -> Any:
        return self._container[self._key]

    def set_raw_value(self, value: Any, *, _unsafe_bypass_check: bool) -> None:
        if not isinstance(self._container, tuple):  # a tuple is immutable
            self._container[self._key] = value


class BoundModule:
    """A copy of the module inside an executable; its attributes are those of the copy."""

    def __init__(self, module: Any, named: Mapping[str, Any], rest: Any) -> None:
        self._module = module
        self._named = named
        self._rest = rest

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Returns the module's outputs, in the mode with which the copy was created."""
        return self._module(*inputs, **{**self._named, **named})

    def __getattr__(self, name: str) -> Any:
        """Returns the module's attribute, for an objective that calls parts of the module."""
        return getattr(self._module, name)

    def read_rest(self) -> Any:
        """Returns the variables that are not trained, in the order of `rest`.

        Untrained parameters keep their arrays, even if a transformation such as `nnx.remat` has replaced the arrays.
        """
        flat = dict(nnx.to_flat_state(nnx.as_pure(nnx.state(self._module))))
        frozen = _find_variables(self._module, nnx.Param)
        before = nnx.to_flat_state(self._rest)
        leaves = [leaf if path in frozen else flat[path] for path, leaf in before if leaf is not None]
        return named_pytrees.replace_leaves(self._rest, leaves)


def _describe(value: Any) -> str:
    """Returns the shape and type of a variable's value, as JAX would convert it; "None" for None."""
    if value is None:
        return "None"
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    return f"{np.shape(value)} of {dtype if named_pytrees.is_key(value) else jax.dtypes.canonicalize_dtype(dtype)}"


def check_optimizer(module: nnx.Module, optimizer: nnx.Optimizer[Any]) -> None:
    """Raises OptimizerError if the optimizer's state was not created for this module's variables."""
    try:
        expected = jax.eval_shape(optimizer.tx.init, nnx.as_pure(nnx.state(module, optimizer.wrt)))
    except jax.errors.JAXTypeError:  # `init` reads values, which do not exist while tracing, so nothing can be compared
        return
    needed, present = (
        {name: np.shape(leaf) for name, leaf in named_pytrees.name_leaves(tree).items()}
        for tree in (expected, nnx.as_pure(optimizer.opt_state))
    )
    for name in {**present, **needed}:
        if needed.get(name) != present.get(name):
            raise OptimizerError(
                f"The nnx.Optimizer was created for another model: its state has {present.get(name, 'nothing')} at "
                f"{name!r}, and this model needs {needed.get(name, 'nothing')}. "
                "Use nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )


def _copy_graph(module: nnx.Module, training: bool) -> Any:
    """Returns the graph and state of a copy of the module.

    For training the copy has the modes that the script has set, else it is in evaluation mode.
    """
    copy = nnx.merge(*nnx.split(module))
    if training:
        train_mode.set_unset_flags(copy)
    else:
        train_mode.set_mode(copy, training=False)
    return nnx.split(copy)


def _needs_rngs(module: Any, has_streams: bool) -> bool:
    """Returns whether a call must give `rngs`: if they are required, or if the module has no random streams of its own.

    >>> _needs_rngs(lambda x, rngs: x, True), _needs_rngs(lambda x, rngs=None: x, True), _needs_rngs(abs, False)
    (True, False, False)
    """
    if "rngs" not in train_mode.list_accepted(module):
        return False
    return not has_streams or inspect.signature(module).parameters["rngs"].default is inspect.Parameter.empty


def _find_variables(module: Any, kind: Any = nnx.Variable) -> dict[tuple[Any, ...], Any]:
    """Returns every variable of a kind by its path, each once."""
    return {path: node for path, node in nnx.iter_graph(module) if isinstance(node, kind)}
