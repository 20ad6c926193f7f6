"""Seeds: every random draw is a pure function of where it stands in the run.

The seed of a shard follows from (run seed, step, shard) and that of an epoch's
order from (run seed, epoch). No generator is carried along, so a run resumed at
any step, on any number of devices, draws what it would have drawn.
"""

import hashlib


def derive(purpose: str, *numbers: int) -> int:
    """A seed of 63 bits for `purpose` at the place that `numbers` name.

    >>> derive("shard", 0, 1, 2) == derive("shard", 0, 1, 2), derive("shard", 0, 1, 2) == derive("shard", 0, 2, 1)
    (True, False)
    """
    text = ":".join([purpose, *(str(int(number)) for number in numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def shard(seed: int, step: int, index: int) -> int:
    """The seed with which shard `index` of step `step` is computed."""
    return derive("shard", seed, step, index)
