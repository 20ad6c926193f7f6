"""Keys: JAX's generators, seeded by where a shard stands in the run."""

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from lockstep.backends.base import Work
from lockstep.core import seeds

KIND = "threefry2x32"  # the same on every kind of device


def of(work: Work, shard: int) -> NDArray[np.uint32]:
    """The numbers of a shard's key: a function of (seed, step, shard)."""
    return _numbers(seeds.shard(work.seed, work.step, shard))


def made(numbers: Any) -> Any:
    """The key out of its numbers."""
    return jax.random.wrap_key_data(numbers, impl=KIND)


def initial(seed: int) -> Any:
    """The key from which a model's first parameters are drawn."""
    return made(_numbers(seeds.derive("init", seed)))


def _numbers(seed: int) -> NDArray[np.uint32]:
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
