"""Seeds: every random draw is a pure function of its place in the run.

The seed of a shard depends on (run seed, step, shard), that of an epoch's order on (run seed, epoch). No state of a
generator is carried over from step to step, so a run that is resumed at any step, on any number of devices, draws the
same numbers as one without interruption.
"""

import hashlib


def derive(purpose: str, *numbers: int) -> int:
    """Returns a seed of 63 bits for `purpose` and a place given by `numbers`.

    >>> derive("shard", 0, 1, 2) == derive("shard", 0, 1, 2), derive("shard", 0, 1, 2) == derive("shard", 0, 2, 1)
    (True, False)
    """
    text = ":".join([purpose, *(str(int(number)) for number in numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def shard(seed: int, step: int, index: int) -> int:
    """Returns the seed with which shard `index` of step `step` is computed."""
    return derive("shard", seed, step, index)
