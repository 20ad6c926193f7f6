"""Nodes: partial sums that are written down first and computed together.

A leaf is a row of a round: what one device computed of one shard. Adding two nodes
only notes that they are to be added. The whole tree then runs as one executable, so
that its cost does not grow with the number of merges.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.backends import host_vectors
from lockstep.backends.base import Node
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums
from lockstep.errors import StateError


@dataclass(eq=False)
class Round:
    """A leaf on every device, or on some: what they have computed in turn."""

    vectors: Mapping[str, Any]  # dtype -> (rows, length), each row on its own device
    read: Callable[[Any, Any, Any], Sums]  # waits for the sums of a shard
    started: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)  # row -> (place, its sums, what they are)

    def sums(self, row: int) -> Sums:
        """The sums of a row's shard, on the host."""
        return self.read(*self.started[row])


class Lazy(Mapping[str, Any]):
    """A node whose vectors are computed when somebody asks for them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __getitem__(self, dtype: str) -> "Vector":
        """The vector of one type, as something that can be cut."""
        return Vector(self, dtype, 0, self.layout.lengths[dtype])

    def __iter__(self) -> Iterator[str]:
        """The types."""
        return iter(self.layout.lengths)

    def __len__(self) -> int:
        """The number of types."""
        return len(self.layout.lengths)

    def total(self) -> "Total":
        """The node, computed."""
        raise NotImplementedError


class Leaf(Lazy):
    """A row of a round."""

    def __init__(self, layout: Layout, of: Round, row: int, evaluate: Callable[[Lazy], "Total"]) -> None:
        super().__init__(layout)
        self.round = of
        self.row = row
        self.evaluate = evaluate
        self._sums: Sums | None = None
        self._total: Total | None = None

    @property
    def sums(self) -> Sums:
        """The sums of this shard."""
        if self._sums is None:
            self._sums = self.round.sums(self.row)
        return self._sums

    def total(self) -> "Total":
        """The row, read where it lies."""
        if self._total is None:
            self._total = Total(self.layout, self._vectors, lambda: self.sums)
        return self._total

    def _vectors(self) -> Mapping[str, Any]:
        return {dtype: rows.addressable_shards[self.row].data[0] for dtype, rows in self.round.vectors.items()}


class Sum(Lazy):
    """Two nodes that are to be added."""

    def __init__(self, left: Lazy, right: Lazy) -> None:
        super().__init__(left.layout)
        self.left = left
        self.right = right
        self._total: Total | None = None

    @property
    def sums(self) -> Sums:
        """The sums of the shards below, added in tree order."""
        return sums(self.left) + sums(self.right)

    def total(self) -> "Total":
        """The sum, computed once."""
        if self._total is None:
            self._total = next(leaves(self)).evaluate(self)
        return self._total


class Total(Lazy):
    """A node that is computed: its vectors lie on the devices, its sums on the host, once they are asked for.

    `divisor` is what the gradient is still to be divided by. The update divides,
    because a division in the tree's executable could be fused with an addition.
    """

    def __init__(self, layout: Layout, vectors: Callable[[], Mapping[str, Any]], read: Callable[[], Sums]) -> None:
        super().__init__(layout)
        self._compute = vectors
        self._vectors: Mapping[str, Any] | None = None
        self._read_sums = read
        self.divisor = 1.0
        self._hosts: dict[str, tuple[float, NDArray[Any]]] = {}

    @property
    def vectors(self) -> Mapping[str, Any]:
        """dtype -> vector, whole on every device."""
        if self._vectors is None:
            self._vectors = self._compute()
        return self._vectors

    def forget(self) -> None:
        """Lets go of the vectors and of what they would be computed from: the next step has begun."""
        self._compute, self._vectors, self._hosts = _gone, None, {}

    @cached_property
    def sums(self) -> Sums:
        """The sums; waits for the devices, and lets go of the leaves below."""
        values = self._read_sums()
        self._read_sums = lambda: values
        return values

    def total(self) -> "Total":
        """Itself."""
        return self

    def host(self, dtype: str) -> NDArray[Any]:
        """A copy of a vector, the sums in their place at its end; made once for each divisor."""
        kept = self._hosts.get(dtype)
        if kept is None or kept[0] != self.divisor:
            kept = self._hosts[dtype] = self.divisor, self._read(dtype)
        return kept[1]

    def _read(self, dtype: str) -> NDArray[Any]:
        last = self.layout.fields[-1]
        result = np.zeros(self.layout.lengths[dtype], dtype)
        if dtype in self.vectors:
            vector = self.vectors[dtype]
            own = np.asarray(vector.addressable_data(0) if len(vector.devices()) > 1 else vector)
            result[: len(own)] = own
            if self.divisor != 1.0:
                end = self.layout.divided.get(dtype, 0)
                result[:end] /= result.dtype.type(self.divisor)
        if dtype == last.dtype:
            result[last.offset : last.offset + last.size] = self.sums
        return result


@dataclass(frozen=True)
class Vector:
    """A range of a node's vector."""

    node: Lazy
    dtype: str
    start: int
    stop: int

    def __getitem__(self, where: slice) -> "Vector":
        """A range of the range."""
        start, stop, step = where.indices(len(self))
        assert step == 1
        return Vector(self.node, self.dtype, self.start + start, self.start + max(start, stop))

    def __len__(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def __dlpack__(self, **more: Any) -> Any:
        """The elements for another framework's transport; waits for them."""
        return np.asarray(self).__dlpack__(**more)

    def __dlpack_device__(self) -> Any:
        """The host."""
        return np.empty(0).__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The elements as numpy; waits for them."""
        return self.node.total().host(self.dtype)[self.start : self.stop].astype(dtype or self.dtype, copy=False)


class Host(Mapping[str, NDArray[Any]]):
    """A partial sum in the host's memory; `given` if an exchange lent it and wants to read it there.

    Without memory from an exchange, a vector is allocated when it is first read. One process never reads it, because
    its partial sums stay on their devices.
    """

    def __init__(self, layout: Layout, memory: memoryview | None) -> None:
        self._layout = layout
        self._memory = memory
        self.given = memory is not None

    @cached_property
    def _vectors(self) -> Mapping[str, NDArray[Any]]:
        return host_vectors.allocate(self._layout, self._memory)

    def __getitem__(self, dtype: str) -> NDArray[Any]:
        """Return the vector of one type."""
        return self._vectors[dtype]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the types."""
        return iter(self._layout.lengths)

    def __len__(self) -> int:
        """Return the number of types."""
        return len(self._layout.lengths)


def _gone() -> Mapping[str, Any]:
    raise StateError(
        "A gradient is there until the next step begins. Got a question for it after that. Read it before."
    )


def leaves(node: Lazy) -> Iterator[Leaf]:
    """The leaves below a node, in the order of their shards."""
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, Sum):
        yield from leaves(node.left)
        yield from leaves(node.right)


def sums(node: Lazy) -> Sums:
    """The sums of a node, on the host."""
    assert isinstance(node, Leaf | Sum | Total)
    return node.sums


def plain(node: Node) -> dict[str, NDArray[Any]]:
    """Every vector of a node, or of a part of one, as numpy."""
    return {dtype: np.asarray(vector) for dtype, vector in node.items()}
