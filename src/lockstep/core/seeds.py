"""Seeds: every random draw is a pure function of its place in the run.

The seed of a shard depends on (run seed, step, shard), that of an epoch's order on (run seed, epoch). No state of a
generator is carried over from step to step, so a run that is resumed at any step, on any number of devices, draws the
same numbers as one without interruption.
"""

import hashlib
from collections.abc import Iterable


def derive(purpose: str, *numbers: int) -> int:
    """Returns a seed of 63 bits that depends on `purpose` and `numbers`, such as a step and a shard.

    >>> derive("shard", 0, 1, 2) == derive("shard", 0, 1, 2), derive("shard", 0, 1, 2) == derive("shard", 0, 2, 1)
    (True, False)
    """
    text = ":".join([purpose, *map(str, map(int, numbers))])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def shard(seed: int, step: int, index: int) -> int:
    """Returns the seed that shard `index` of step `step` uses."""
    return derive("shard", seed, step, index)


def gradient_pass(seed: int, index: int) -> int:
    """Returns the seed to use for the run's seed in pass `index` over one step, so that passes draw different numbers.

    >>> gradient_pass(7, 0), gradient_pass(7, 1) == gradient_pass(7, 2)
    (7, False)
    """
    return derive("pass", seed, index) if index else seed


def update(seed: int, step: int) -> int:
    """Returns the seed that every replica uses in the update of a step, for an optimizer that draws numbers."""
    return derive("update", seed, step)


def shards(seed: int, step: int, indices: Iterable[int]) -> dict[int, int]:
    """Returns the seeds of several shards of a step."""
    return {index: derive("shard", seed, step, index) for index in indices}
