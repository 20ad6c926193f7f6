"""Modules: a `flax.nnx.Module`, which holds its own variables.

The script's module is never run: a copy of its graph is, with the shard's own
variables in it. After every step the module's variables get the new arrays, and
an array that the script has put there since is seen by its being another object.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from lockstep.backends.jax import named_pytrees, train_mode
from lockstep.backends.jax.attributes import Attributes
from lockstep.errors import ModelError, OptimizerError


class Module:
    """An nnx module, its trained variables and the rest."""

    home = "model"
    donated = False  # the script's own module holds the arrays

    def __init__(self, module: nnx.Module, wrt: Any) -> None:
        self._module = module
        self._wrt = wrt
        self._attributes = Attributes(module)
        self.mode_flags: train_mode.ModuleModes | None = train_mode.ModuleModes(module)
        self._keeps = _variables(module)
        self._published: list[Any] = []
        self._split()

    def _split(self) -> None:
        """Takes the module's variables as they are now, without its generators and what it has sown."""
        parts: Any = nnx.split(self._module, self._wrt, (nnx.RngState, nnx.Intermediate), ...)
        _, params, _, rest = parts
        self.params, self.rest = nnx.as_pure(params), nnx.as_pure(rest)
        self._names = [*named_pytrees.named(self.params), *named_pytrees.named(self.rest)]
        self._owners, self._empty = self._found(params, rest)
        self._published = self.held()

    def _found(self, *states: Any) -> tuple[list[Any], list[Any]]:
        """What holds each array: a variable of the module's or a plain attribute; and the variables that hold None."""
        nodes = dict(nnx.iter_graph(self._module))
        owners, empty = [], []
        for path in (path for state in states for path, _ in nnx.to_flat_state(state)):
            variable = self._keeps.get(path)
            if variable is None:
                owners.append(_Attribute(nodes[path[:-1]], path[-1]))
            elif variable.get_raw_value() is None:
                empty.append(variable)
                self._names.append(named_pytrees.name(path))
            elif jax.tree_util.treedef_is_leaf(jax.tree.structure(variable.get_raw_value())):
                owners.append(variable)
            else:
                kind = type(variable.get_raw_value()).__name__
                raise ModelError(
                    f"A variable holds one array. Got one with a {kind} at {named_pytrees.name(path)!r}. "
                    "Give every array a variable of its own."
                )
        return owners, empty

    def bind(self, params: Any, rest: Any, key: Any, training: bool) -> "BoundModule":
        """A copy of the module with these variables and a shard's own keys."""
        module = nnx.merge(*_graph(self._module, training), copy=True)
        nnx.update(module, params)
        nnx.update(module, rest)
        for index, variable in enumerate(_variables(module, nnx.RngState).values()):
            old = variable.get_raw_value()
            if isinstance(variable, nnx.RngKey):
                fresh = jax.random.fold_in(key, index)  # a key of its own for every stream
                variable.set_raw_value(jax.random.split(fresh, old.shape) if old.shape else fresh)
            else:
                variable.set_raw_value(jax.numpy.zeros(old.shape, old.dtype))
        name = train_mode.argument(module.__call__)
        return BoundModule(module, {} if name is None else {name: train_mode.value(name, training)}, rest)

    def start(self, inputs: Any, key: Any) -> None:
        """An nnx module has its variables from the beginning."""

    def publish(self, params: Any, rest: Any) -> None:
        """Puts the arrays into the script's own variables."""
        self.params, self.rest = params, rest
        for owner, leaf in zip(self._owners, [*jax.tree.leaves(params), *jax.tree.leaves(rest)], strict=True):
            owner.set_raw_value(leaf, _unsafe_bypass_check=True)
        self._published = self.held()

    def changed(self) -> bool:
        """Whether a variable holds another array than the one put there; takes it over."""
        held = self.held()
        if all(one is other for one, other in zip(held, self._published, strict=True)):
            return False
        for name, old, new in zip(self._names, self._published, held, strict=True):
            if _form(old) != _form(new):
                raise ModelError(
                    f"A variable keeps its shape and type. Got {_form(new)} where {_form(old)} was, at {name!r}. "
                    "Write an array of that form, or call lockstep.wrap again."
                )
        self._split()
        return True

    def signature(self) -> Any:
        """The numbers and words in every module of the graph; what else hangs there is to stay."""
        return self._attributes.look()

    def controls(self) -> Any:
        """The same numbers and words, which another process may turn."""
        return self._attributes.look()

    def turn(self, controls: Any) -> None:
        """Writes another process's numbers and words into the script's own module."""
        self._attributes.write(controls)

    def held(self) -> list[Any]:
        """The arrays in the script's own variables."""
        return [owner.get_raw_value() for owner in (*self._owners, *self._empty)]


class _Attribute:
    """An array that no variable holds but a module itself, or a dict or list in it, with a variable's face."""

    def __init__(self, node: Any, key: Any) -> None:
        own = isinstance(node, nnx.Pytree)
        self._place: Any = vars(node) if own else node
        self._key: Any = str(key) if own else key

    def get_raw_value(self) -> Any:
        return self._place[self._key]

    def set_raw_value(self, value: Any, *, _unsafe_bypass_check: bool) -> None:
        if not isinstance(self._place, tuple):  # which cannot be written to
            self._place[self._key] = value


class BoundModule:
    """A copy of the module inside an executable; its attributes are the module's own."""

    def __init__(self, module: Any, mode: Mapping[str, bool], rest: Any) -> None:
        self._module = module
        self._mode = mode
        self._rest = rest

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The module's outputs, in the mode asked for."""
        return self._module(*inputs, **{**self._mode, **named})

    def __getattr__(self, name: str) -> Any:
        """The module's own attribute, for an objective that calls parts of it."""
        return getattr(self._module, name)

    def others(self) -> Any:
        """The variables that are not trained, in the order in which they came.

        Parameters among them are left out of training and so stay, also where a transformation such as `nnx.remat`
        has put them back as if they were new.
        """
        flat = dict(nnx.to_flat_state(nnx.as_pure(nnx.state(self._module))))
        frozen = _variables(self._module, nnx.Param)
        came = nnx.to_flat_state(self._rest)
        leaves = [leaf if path in frozen else flat[path] for path, leaf in came if leaf is not None]
        return named_pytrees.refilled(self._rest, leaves)


def _form(value: Any) -> str:
    if value is None:
        return "None"
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    return f"{np.shape(value)} of {dtype if named_pytrees.is_key(value) else jax.dtypes.canonicalize_dtype(dtype)}"


def check_optimizer(module: nnx.Module, optimizer: nnx.Optimizer[Any]) -> None:
    """Refuses an optimizer whose state is not that of this module's variables."""
    try:
        made = jax.eval_shape(optimizer.tx.init, nnx.as_pure(nnx.state(module, optimizer.wrt)))
    except jax.errors.JAXTypeError:  # it wants to see numbers: nothing can be told without them
        return
    ours, theirs = (
        {name: np.shape(leaf) for name, leaf in named_pytrees.named(tree).items()}
        for tree in (made, nnx.as_pure(optimizer.opt_state))
    )
    for name in {**theirs, **ours}:
        if ours.get(name) != theirs.get(name):
            raise OptimizerError(
                f"An nnx.Optimizer goes with the model it was made for. At {name!r} it has "
                f"{theirs.get(name, 'nothing')}, for this model it would have {ours.get(name, 'nothing')}. "
                "Make it anew: nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )


def _graph(module: nnx.Module, training: bool) -> Any:
    """The graph and state of a copy; it trains in the modes that the script has set, and rests in evaluation mode."""
    copy = nnx.merge(*nnx.split(module))
    if training:
        train_mode.train_unset(copy)
    else:
        train_mode.turn(copy, training=False)
    return nnx.split(copy)


def _variables(module: Any, kind: Any = nnx.Variable) -> dict[tuple[Any, ...], Any]:
    """Every variable of a kind by its path, each once."""
    return {path: node for path, node in nnx.iter_graph(module) if isinstance(node, kind)}
