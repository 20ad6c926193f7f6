"""Keys: JAX's generators, seeded by where a shard stands in the run."""

import zlib
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from lockstep.backends.base import Work
from lockstep.core import seeds

_STREAMS = ("params", "dropout")
KIND = "threefry2x32"  # the same on every kind of device


def of(work: Work, shard: int) -> NDArray[np.uint32]:
    """The numbers of a shard's key: a function of (seed, step, shard)."""
    return _numbers(seeds.shard(work.seed, work.step, shard))


def made(numbers: Any) -> Any:
    """The key out of its numbers."""
    return jax.random.wrap_key_data(numbers, impl=KIND)


@jax.tree_util.register_pytree_node_class
class Streams(dict[str, Any]):
    """Keys by name, out of one.

    'params' and 'dropout' are there; a linen module derives what else it asks for from the first. Any other name that
    a function asks for is derived from the key itself.
    """

    def __init__(self, key: Any) -> None:
        super().__init__({name: jax.random.fold_in(key, index) for index, name in enumerate(_STREAMS)})
        self._key = key

    def __missing__(self, name: str) -> Any:
        return jax.random.fold_in(self._key, zlib.crc32(name.encode()))

    def tree_flatten(self) -> tuple[list[Any], list[str]]:
        """As a dict is, and the key: a function may hand its keys to another that is compiled."""
        names = sorted(self)
        return [self._key, *(self[name] for name in names)], names

    @classmethod
    def tree_unflatten(cls, names: list[str], leaves: list[Any]) -> "Streams":
        streams = cls.__new__(cls)
        streams._key, *values = leaves
        streams.update(zip(names, values, strict=True))
        return streams


def initial(seed: int) -> Any:
    """The key from which a model's first parameters are drawn."""
    return made(_numbers(seeds.derive("init", seed)))


def _numbers(seed: int) -> NDArray[np.uint32]:
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
