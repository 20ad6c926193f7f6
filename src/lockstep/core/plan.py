"""The plan: how a batch is split into shards, and which replica computes which shard.

The split depends on the number of examples and of shards only; which replica computes a shard changes only the time
it takes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from lockstep.errors import PlanError

MAX_SHARDS = 4096  # far more devices than one model is trained on; each shard costs time even if it is empty
MAX_DEFAULT_SHARDS = 8
MIN_DEFAULT_EXAMPLES = 64


def default_shards(batch_size: int, num_devices: int, accelerated: bool = False) -> int:
    """Returns the number of shards that is used if none is given.

    On CPUs it depends on the batch size: the largest power of two up to 8 that leaves at least 64 examples
    per shard. Only if there are more devices than that is it the next power of two >= devices. On
    accelerators it is one shard per device, because there every further shard costs as much as a whole step.

    >>> [default_shards(size, 1) for size in (512, 256, 128, 64, 1)], default_shards(128, 3)
    ([8, 4, 2, 1, 1], 4)
    >>> default_shards(256, 2, accelerated=True)
    2
    """
    if accelerated:
        return num_devices
    shards = MAX_DEFAULT_SHARDS
    while shards > 1 and batch_size < shards * MIN_DEFAULT_EXAMPLES:
        shards //= 2
    return max(shards, next_power_of_two(num_devices))


def explain_default(batch_size: int, num_devices: int, accelerated: bool = False) -> str:
    """Describes what the default number of shards means for other numbers of devices; empty if any up to 8 fits.

    >>> explain_default(256, 2, accelerated=True)
    'same bits on 1 or 2 devices; shards=8 for 1 to 8'
    >>> explain_default(64, 3)
    'the batch alone would give 1, raised because each of 3 devices needs one; shards=4 for the same bits on fewer'
    >>> explain_default(256, 3)
    ''
    """
    if accelerated:
        equal = {1: "1 device", 2: "1 or 2 devices"}.get(num_devices, f"1 to {num_devices} devices")
        more = MAX_DEFAULT_SHARDS
        return f"same bits on {equal}" + (f"; shards={more} for 1 to {more}" if num_devices < more else "")
    alone, shards = default_shards(batch_size, 1), default_shards(batch_size, num_devices)
    if shards == alone:
        return ""
    return (
        f"the batch alone would give {alone}, raised because each of {num_devices} devices needs one; "
        f"shards={shards} for the same bits on fewer"
    )


def next_power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below `number`.

    >>> [next_power_of_two(number) for number in (1, 2, 3, 9)]
    [1, 2, 4, 16]
    """
    return 1 << max(0, number - 1).bit_length()


def default_threads(num_threads: int, num_shards: int) -> int:
    """Returns the default number of threads per shard on a CPU, which does not depend on the number of devices."""
    return max(1, num_threads // num_shards)


def sizes(num_examples: int, num_shards: int) -> list[int]:
    """Returns the number of examples in each shard; sizes differ by at most one, larger ones first.

    >>> sizes(61, 8), sizes(3, 4)
    ([8, 8, 8, 8, 8, 7, 7, 7], [1, 1, 1, 0])
    """
    size, extra = divmod(num_examples, num_shards)
    return [size + (index < extra) for index in range(num_shards)]


@lru_cache
def bounds(num_examples: int, num_shards: int) -> tuple[tuple[int, int], ...]:
    """Returns the start and stop of each shard in the batch.

    >>> bounds(5, 2)
    ((0, 3), (3, 5))
    """
    result = []
    start = 0
    for size in sizes(num_examples, num_shards):
        result.append((start, start + size))
        start += size
    return tuple(result)


@dataclass(frozen=True)
class Plan:
    """Which replica computes which shard: `owners[shard]` is the number of a replica, one of `replicas`.

    The replicas' numbers may have gaps, because the number of a lost replica stays free.

    >>> Plan.even(8, range(3)).owners
    (0, 0, 0, 1, 1, 1, 2, 2)
    """

    owners: tuple[int, ...]
    replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises if there are more replicas than shards, or a shard's replica does not exist."""
        count = len(self.replicas)
        if count > len(self.owners):
            raise PlanError(
                f"devices={count} needs at least {count} shards, got shards={len(self.owners)}. "
                f"Use shards={next_power_of_two(count)}, or devices={len(self.owners)}."
            )
        if not set(self.owners) <= set(self.replicas):
            raise PlanError(
                f"owners={self.owners} has a number that is not among the replicas {self.replicas}. Give each shard "
                "the number of one of them."
            )

    @classmethod
    def even(cls, num_shards: int, replicas: Iterable[int]) -> "Plan":
        """Assigns each replica a range of adjacent shards; no replica gets more than one shard more than another.

        Returns the same object for the same numbers, so that comparing plans costs nothing.
        """
        return _assign_evenly(num_shards, tuple(replicas))

    @classmethod
    def from_counts(cls, counts: Mapping[int, int]) -> "Plan":
        """Assigns each replica its number of adjacent shards in `counts`, in the order of that mapping.

        >>> Plan.from_counts({1: 3, 0: 1})
        Plan(owners=(1, 1, 1, 0), replicas=(1, 0))
        """
        return cls(tuple(replica for replica, count in counts.items() for _ in range(count)), tuple(counts))

    @property
    def num_shards(self) -> int:
        """The number of shards in a batch."""
        return len(self.owners)

    def shards_of(self, replicas: Sequence[int]) -> list[int]:
        """Returns the shards that these replicas compute, in order."""
        return [shard for shard, owner in enumerate(self.owners) if owner in replicas]


@cache
def _assign_evenly(num_shards: int, replicas: tuple[int, ...]) -> Plan:
    return Plan.from_counts(dict(zip(replicas, sizes(num_shards, len(replicas)), strict=True)))
