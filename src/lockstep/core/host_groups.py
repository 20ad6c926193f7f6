"""The groups of launched processes that share memory, and who sends which slice of the vectors to whom.

The processes of a host that share memory appear to the others as one: their partial sums are added as far as the tree
allows before they leave the host. Every rank adds one slice of the root for all. A process that shares memory with no
other is a group of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class HostGroups:
    """Groups of ranks that share memory; every rank is in one of them.

    The processes of a group share the work for the slices of another group. In a group of `n` processes, the process at
    index `i` does the work for the ranks at the indices `i`, `i + n`, `i + 2n` … of the other group.

    >>> groups = HostGroups(((0, 1), (2,)))
    >>> groups.find_senders(2), groups.find_receivers(0), groups.find_receivers(1)
    ([0], [2], [])
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def from_hosts(cls, hosts: Sequence[object]) -> "HostGroups":
        """Groups the ranks whose entries in `hosts` are equal, in the order in which the hosts appear.

        >>> HostGroups.from_hosts(["a", "b", "a"]).groups
        ((0, 2), (1,))
        """
        found: dict[object, list[int]] = {}
        for rank, host in enumerate(hosts):
            found.setdefault(host, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    def describe(self) -> str:
        """Returns in words how partial sums reach the other processes, if there are any.

        >>> HostGroups(((0, 1), (2,))).describe()
        'sums added within 2 groups of processes in shared memory, then between them'
        >>> HostGroups(((0,),)).describe()
        ''
        """
        if len(self.group_of) == 1:
            return ""
        if len(self.groups) == 1:
            return "sums added in shared memory"
        if len(self.groups) == len(self.group_of):
            return "sums sent from every process to every other"
        return f"sums added within {len(self.groups)} groups of processes in shared memory, then between them"

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The index of each rank's group."""
        return {rank: index for index, group in enumerate(self.groups) for rank in group}

    def get_mates(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that share memory with `rank`, including `rank`."""
        return self.groups[self.group_of[rank]]

    def find_senders(self, rank: int) -> list[int]:
        """Returns, for each other group, the process that sends that group's partial sums of the slice of `rank`.

        The same processes receive the sum of the slice.
        """
        own = self.get_mates(rank)
        return [group[own.index(rank) % len(group)] for group in self.groups if group is not own]

    def find_receivers(self, rank: int) -> list[int]:
        """Returns the ranks of other groups for whose slices `rank` sends the partial sums of its own group."""
        own = self.get_mates(rank)
        return [
            other
            for group in self.groups
            if group is not own
            for index, other in enumerate(group)
            if index % len(own) == own.index(rank)
        ]
