"""JAX random keys, derived from the seed, the step and the shard."""

import zlib
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from lockstep.core import seeds
from lockstep.core.types import Work

_STREAMS = ("params", "dropout")
IMPL = "threefry2x32"  # draws the same numbers on every kind of device


def derive_shard_key(work: Work, shard: int) -> NDArray[np.uint32]:
    """Returns the integers of a shard's random key, which follow from (seed, step, shard) alone."""
    return _split_seed(seeds.shard(work.seed, work.step, shard))


def wrap_key(data: Any) -> Any:
    """Returns the JAX random key that consists of these integers."""
    return jax.random.wrap_key_data(data, impl=IMPL)


@jax.tree_util.register_pytree_node_class
class NamedKeys(dict[str, Any]):
    """The random keys `rngs` of a linen module or a function, by name, derived from one key.

    The dict has 'params' and 'dropout'; a linen module derives the keys of other names from 'params'. If a function
    reads another name, it gets a key that is derived from the one key and that name.
    """

    def __init__(self, key: Any) -> None:
        super().__init__({name: jax.random.fold_in(key, index) for index, name in enumerate(_STREAMS)})
        self._key = key

    def __missing__(self, name: str) -> Any:
        """Returns the key of a name that the dict does not have; crc32, because `hash` differs between processes."""
        return jax.random.fold_in(self._key, zlib.crc32(name.encode()))

    def tree_flatten(self) -> tuple[list[Any], list[str]]:
        """Returns the leaves and the names of the dict, so that a jitted function can take the dict as a pytree.

        The first leaf is the random key from which all others derive; the others are in the order of the names.
        """
        names = sorted(self)
        return [self._key, *(self[name] for name in names)], names

    @classmethod
    def tree_unflatten(cls, names: list[str], leaves: list[Any]) -> "NamedKeys":
        """Returns the dict from what `tree_flatten` has returned."""
        streams = cls.__new__(cls)
        streams._key, *values = leaves
        streams.update(zip(names, values, strict=True))
        return streams


def derive_initial_key(seed: int) -> Any:
    """Returns the key with which a model's parameters are initialized."""
    return wrap_key(_split_seed(seeds.derive("init", seed)))


def _split_seed(seed: int) -> NDArray[np.uint32]:
    """Returns the two halves of a 64-bit seed, which are the data of a threefry key."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
