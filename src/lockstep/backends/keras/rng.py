"""Generators: the one that Keras draws from where a layer has none of its own.

`keras.random.normal(shape)` without a seed draws from a generator of the whole process.
A shard gets one in its place, whose state follows from the shard's own seed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR


def global_seed() -> int | None:
    """Return the seed that `keras.utils.set_random_seed` was given; None if it was not called."""
    seed: int | None = global_state.get_global_attribute("global_random_seed")
    return seed


def stand_in() -> Any:
    """A generator to draw from; None on JAX, where Keras itself refuses such draws and says what to write."""
    return None if keras.config.backend() == "jax" else keras.random.SeedGenerator(0, name="of_a_shard")


@contextmanager
def drawing_from(generator: Any) -> Iterator[None]:
    """Inside, who has no generator draws from this one."""
    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if generator is not None:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)
