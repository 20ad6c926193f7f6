"""Names the arrays of a pytree, and reads and writes them as the named arrays of a state.

A name is the path in the pytree joined with dots: `params.Dense_0.kernel`, `0.mu.layers.0.kernel`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import dtypes
from numpy.typing import NDArray

from lockstep.core.state import ArraySpec
from lockstep.core.types import Array
from lockstep.errors import ModelError, StateError


def name_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree by name, in the pytree's order."""
    leaves = [(join_path(map(_read_key, path)), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    result = dict(leaves)
    if len(result) < len(leaves):
        ((duplicate, _),) = Counter(name for name, _ in leaves).most_common(1)
        raise ModelError(
            f"Two arrays of the model have the same name {duplicate!r}: a name consists of the keys on the way to the "
            "array, joined with dots. Use keys without dots."
        )
    return result


def check_arrays(tree: Any) -> None:
    """Raises ModelError if a leaf is neither an array nor a number, or if two leaves have one name."""
    for name, leaf in name_leaves(tree).items():
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise ModelError(
                f"The model's variables must be arrays. Got a {type(leaf).__name__} at {name!r}. Give the arrays "
                "alone, and use everything else in the function: with equinox, params, static = eqx.partition(model, "
                "eqx.is_array), and (lambda params, x: jax.vmap(eqx.combine(params, static))(x), params) as the model."
            )


def join_path(path: Iterable[Any]) -> str:
    """Returns a path's entries joined with dots."""
    return ".".join(map(str, path))


def replace_leaves(tree: Any, leaves: list[Any]) -> Any:
    """Returns a pytree of the same structure with these leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def to_array(leaf: Any) -> Array:
    """Returns a copy of one array in the form that a state stores."""
    data = np.array(to_numpy(leaf))
    return Array(data, str(data.dtype))


def read_state(prefix: str, tree: Any, state: Mapping[str, Array]) -> Any:
    """Returns a pytree like `tree` with the arrays of a state; the caller has checked their shapes and dtypes."""
    leaves = [wrap_key(state[f"{prefix}.{name}"].data, leaf) for name, leaf in name_leaves(tree).items()]
    return replace_leaves(tree, leaves)


def read_specs(prefix: str, tree: Any) -> dict[str, ArraySpec]:
    """Returns the shapes and dtypes that a pytree's arrays have in a state, by name."""
    return {f"{prefix}.{name}": _read_spec(leaf) for name, leaf in name_leaves(tree).items()}


def is_key(leaf: Any) -> bool:
    """Returns whether this is an array of JAX random keys."""
    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, dtypes.prng_key))


def to_numpy(leaf: Any) -> NDArray[Any]:
    """Returns an array's elements on the host; for random keys, the integers they consist of."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else select_copy(leaf))


def copy_leaves(tree: Any) -> Any:
    """Returns a copy of the pytree on JAX's default device, whose memory no later step donates."""
    return jax.tree.map(lambda leaf: wrap_key(jax.numpy.array(to_numpy(leaf)), leaf), tree)


def select_copy(leaf: Any) -> Any:
    """Returns the first device's copy of a replicated array, so that a read waits for this device only."""
    if isinstance(leaf, jax.Array) and not is_key(leaf) and len(leaf.devices()) > 1:
        leaf = leaf.addressable_data(0)
    return leaf


def check_not_donated(tree: Any) -> None:
    """Raises StateError if the script has donated the memory of an array to a jitted function."""
    if any(map(_is_deleted, jax.tree.leaves(tree))):
        donated = [name for name, leaf in name_leaves(tree).items() if _is_deleted(leaf)]
        raise StateError(
            f"The memory of {len(donated)} arrays of the model was donated, the first at {donated[0]!r}. Remove "
            "donate_argnums from the jitted function that got these arrays, or give lockstep.wrap the arrays that the "
            "function returned."
        )


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(leaf.is_deleted())


def _read_spec(leaf: Any) -> ArraySpec:
    """Returns the shape and dtype that `to_array` gives this leaf."""
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf  # random keys are stored as integers
    dtype = data.dtype if hasattr(data, "dtype") else np.asarray(data).dtype
    return ArraySpec(tuple(np.shape(data)), str(dtype))


def wrap_key(data: Any, like: Any) -> Any:
    """Returns a random key with these integers if `like` is a random key, else the data as it is."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like)) if is_key(like) else data


def _read_key(key: Any) -> str:
    """Returns one entry of a path as text: a dict's key, an attribute's name, or a position."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
