"""Reads Keras's global seed, and replaces its global seed generator while a shard is computed.

`keras.random.normal(shape)` without a seed uses the global generator of the process. In a shard, Keras gets another
generator instead, whose state follows from the shard's own seed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR


def read_global_seed() -> int | None:
    """Returns the seed that `keras.utils.set_random_seed` was given; None if it was not called."""
    seed: int | None = global_state.get_global_attribute("global_random_seed")
    return seed


def create_generator() -> Any:
    """Returns a seed generator for shards; None on JAX, where Keras refuses random operations without a seed."""
    return None if keras.config.backend() == "jax" else keras.random.SeedGenerator(0, name="shard_generator")


@contextmanager
def replace_global_generator(generator: Any) -> Iterator[None]:
    """Replaces Keras's global generator inside this context; does nothing if `generator` is None."""
    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if generator is not None:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)
