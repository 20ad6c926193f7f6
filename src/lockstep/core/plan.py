"""The plan: how a batch is cut into shards and which replica computes which.

The cut depends on the number of examples and of shards alone; who computes a
shard changes only the time it takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import PlanError

MAX_DEFAULT_SHARDS = 8
MIN_DEFAULT_EXAMPLES = 32


def default_shards(batch_size: int, num_devices: int) -> int:
    """The number of shards when none is given: a rule of the batch size.

    The largest power of two up to 8 that leaves at least 32 examples a shard.
    Only when there are more devices than that is it the next power of two that
    gives every device a shard.

    >>> [default_shards(size, 1) for size in (256, 128, 64, 32, 1)], default_shards(64, 3)
    ([8, 4, 2, 1, 1], 4)
    """
    shards = MAX_DEFAULT_SHARDS
    while shards > 1 and batch_size < shards * MIN_DEFAULT_EXAMPLES:
        shards //= 2
    while shards < num_devices:
        shards *= 2
    return shards


def default_threads(num_threads: int, num_shards: int) -> int:
    """The threads per shard on a CPU when none are given; never a matter of the number of devices."""
    return max(1, num_threads // num_shards)


def sizes(num_examples: int, num_shards: int) -> list[int]:
    """The number of examples in each shard; sizes differ by at most one, larger ones first.

    >>> sizes(61, 8), sizes(3, 4)
    ([8, 8, 8, 8, 8, 7, 7, 7], [1, 1, 1, 0])
    """
    size, extra = divmod(num_examples, num_shards)
    return [size + (index < extra) for index in range(num_shards)]


def bounds(num_examples: int, num_shards: int) -> list[tuple[int, int]]:
    """Where each shard starts and stops in the batch.

    >>> bounds(5, 2)
    [(0, 3), (3, 5)]
    """
    result = []
    start = 0
    for size in sizes(num_examples, num_shards):
        result.append((start, start + size))
        start += size
    return result


@dataclass(frozen=True)
class Plan:
    """Which replica computes which shard: `owners[shard]` is the replica's index.

    >>> Plan.even(8, 3).owners
    (0, 0, 0, 1, 1, 1, 2, 2)
    """

    owners: tuple[int, ...]
    num_replicas: int

    def __post_init__(self) -> None:
        """Refuses a plan that leaves a replica without work or names one that is not there."""
        if self.num_replicas > len(self.owners):
            raise PlanError(
                f"Every device needs a shard. Got devices={self.num_replicas}, shards={len(self.owners)}. "
                f"Use shards={default_shards(0, self.num_replicas)}, or devices={len(self.owners)}."
            )
        if not set(self.owners) <= set(range(self.num_replicas)):
            raise PlanError(f"A shard's owner is a replica from 0 to {self.num_replicas - 1}. Got {self.owners}.")

    @classmethod
    def even(cls, num_shards: int, num_replicas: int) -> "Plan":
        """Neighbouring shards together, as many on each replica as on the others, give or take one."""
        counts = sizes(num_shards, num_replicas)
        return cls(tuple(replica for replica, count in enumerate(counts) for _ in range(count)), num_replicas)

    @property
    def num_shards(self) -> int:
        """The number of shards in a batch."""
        return len(self.owners)

    def shards_of(self, replicas: Sequence[int]) -> list[int]:
        """The shards that these replicas compute, in order."""
        return [shard for shard, owner in enumerate(self.owners) if owner in replicas]
