"""Nodes: flat vectors in the device's own memory, or in memory that an exchange lent, with their arrays as views.

An exchange's memory is the host's. A GPU writes a leaf into a node of its own first
and moves it there vector by vector: array by array, it would be waited for a hundred times.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.backends.base import Node
from lockstep.backends.torch.shards import Fields
from lockstep.core.layout import Layout

_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


class Vectors(dict[str, Tensor]):
    """A node, with its arrays as views."""

    def __init__(self, vectors: Mapping[str, Tensor], layout: Layout, num_trained: int) -> None:
        super().__init__(vectors)
        self.layout = layout
        self.num_trained = num_trained
        self.fields = Fields(layout, self, num_trained)

    @classmethod
    def on(cls, device: torch.device, layout: Layout, num_trained: int) -> "Vectors":
        """In memory of the device's own."""
        lengths = layout.lengths.items()
        vectors = {dtype: torch.zeros(length, dtype=_TYPES[dtype], device=device) for dtype, length in lengths}
        return cls(vectors, layout, num_trained)

    @classmethod
    def within(cls, memory: memoryview, layout: Layout, num_trained: int) -> "Vectors":
        """In the memory that was lent."""
        vectors = {
            dtype: torch.frombuffer(memory, dtype=_TYPES[dtype], count=length, offset=layout.starts[dtype])
            for dtype, length in layout.lengths.items()
        }
        return cls(vectors, layout, num_trained)

    def take(self, other: Node) -> None:
        """Copies another node's vectors."""
        for dtype, vector in other.items():
            self[dtype].copy_(vector)


class Nearby:
    """A node on the device for each that does not lie there; one, kept from step to step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: Vectors | None = None

    def of(self, node: Node) -> Vectors:
        """The node itself where it lies on the device, else the device's own, with whatever it holds."""
        assert isinstance(node, Vectors)
        if all(vector.device.type == self._device.type for vector in node.values()):
            return node
        if self._own is None or self._own.layout is not node.layout:
            self._own = Vectors.on(self._device, node.layout, node.num_trained)
        return self._own

    def filled(self, node: Node) -> Vectors:
        """The node itself where it lies on the device, else a copy there."""
        near = self.of(node)
        if near is not node:
            near.take(node)
        return near
