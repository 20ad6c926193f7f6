"""Trees: nests of arrays by name, as the state and the digests know them.

A name is the framework's own path joined with dots: `params.Dense_0.kernel`,
`layers.0.kernel`, `0.mu.layers.0.kernel`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import dtypes
from numpy.typing import NDArray

from lockstep.backends.base import Array, State
from lockstep.core.state import ArraySpec
from lockstep.errors import ModelError, StateError


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a nest by name, in the nest's own order."""
    leaves = [(name(map(_part, path)), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    result = dict(leaves)
    if len(result) < len(leaves):
        ((twice, _),) = Counter(each for each, _ in leaves).most_common(1)
        raise ModelError(f"Every array has a name of its own. Got two called {twice!r}. Use names without dots.")
    return result


def name(path: Iterable[Any]) -> str:
    """The name of what lies at a path."""
    return ".".join(map(str, path))


def refilled(tree: Any, leaves: list[Any]) -> Any:
    """The same nest with other leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def to_state(prefix: str, tree: Any) -> State:
    """A copy of every array of a nest, by name, as numpy holds it."""
    return {f"{prefix}.{name}": to_array(leaf) for name, leaf in named(tree).items()}


def to_array(leaf: Any) -> Array:
    """A copy of one array, as a state has it."""
    data = np.array(numbers(leaf))
    return Array(data, str(data.dtype))


def from_state(prefix: str, tree: Any, state: Mapping[str, Array]) -> Any:
    """Build the same pytree from the state's arrays, which fit."""
    leaves = [wrapped(state[f"{prefix}.{name}"].data, leaf) for name, leaf in named(tree).items()]
    return refilled(tree, leaves)


def read_specs(prefix: str, tree: Any) -> dict[str, ArraySpec]:
    """Describe the arrays of a pytree as a state has them."""
    return {f"{prefix}.{name}": _read_spec(leaf) for name, leaf in named(tree).items()}


def is_key(leaf: Any) -> bool:
    """Whether this is a key of JAX's generators, and no array of numbers."""
    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, dtypes.prng_key))


def numbers(leaf: Any) -> NDArray[Any]:
    """The elements on the host; a key of JAX's generators goes as the numbers it is made of."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else host(leaf))


def copied(tree: Any) -> Any:
    """Copies on JAX's default device that no later step takes away."""
    return jax.tree.map(lambda leaf: wrapped(jax.numpy.array(numbers(leaf)), leaf), tree)


def host(leaf: Any) -> Any:
    """The bytes of an array that lies on one or several devices of this process, without waiting for more than one."""
    if isinstance(leaf, jax.Array) and not is_key(leaf) and len(leaf.devices()) > 1:
        leaf = leaf.addressable_data(0)
    return leaf


def check_there(tree: Any) -> None:
    """Refuses arrays whose memory the script has given away."""
    if any(map(_is_deleted, jax.tree.leaves(tree))):
        gone = [name for name, leaf in named(tree).items() if _is_deleted(leaf)]
        raise StateError(
            f"A model's arrays are there. Got {len(gone)} whose memory was donated, the first at {gone[0]!r}. "
            "Leave donate_argnums out where the model goes on, or give lockstep.wrap the arrays that came back."
        )


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(leaf.is_deleted())


def _read_spec(leaf: Any) -> ArraySpec:
    """Return the shape and dtype that `to_array` gives this leaf."""
    plain = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    dtype = plain.dtype if hasattr(plain, "dtype") else np.asarray(plain).dtype
    return ArraySpec(tuple(np.shape(plain)), str(dtype))


def wrapped(numbers: Any, like: Any) -> Any:
    """The numbers, as a key where they are those of one."""
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(like)) if is_key(like) else numbers


def _part(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
