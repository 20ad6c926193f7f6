"""The layout: where each array lies in the flat vectors of a leaf.

A leaf is one vector per accumulation type. Every array starts at a multiple of
512 bytes, because kernels choose their path by alignment and with it their bits.
The layout follows from the model alone, never from the number of devices.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

ALIGNMENT = 512


@dataclass(frozen=True)
class Field:
    """One array of a leaf: `size` elements of the vector `dtype`, from element `offset` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The arrays of a leaf in vectors: first the gradients, which one division scales, then the rest.

    >>> layout = Layout.of(gradients=[("w", "float32", (3,))], others=[("mean", "float32", (2,))])
    >>> [(field.name, field.offset) for field in layout.fields], layout.lengths, layout.divided
    ([('w', 0), ('mean', 128)], {'float32': 256}, {'float32': 128})
    """

    fields: tuple[Field, ...]
    lengths: Mapping[str, int]
    divided: Mapping[str, int]

    @classmethod
    def of(
        cls,
        gradients: Iterable[tuple[str, str, tuple[int, ...]]],
        others: Iterable[tuple[str, str, tuple[int, ...]]],
    ) -> "Layout":
        """Lays out (name, dtype, shape) after (name, dtype, shape)."""
        fields: list[Field] = []
        lengths: dict[str, int] = {}

        def place(arrays: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
            for name, dtype, shape in arrays:
                start = lengths.setdefault(dtype, 0)
                fields.append(Field(name, dtype, shape, start))
                step = ALIGNMENT // np.dtype(dtype).itemsize
                lengths[dtype] = start + -(-max(prod(shape), 1) // step) * step

        place(gradients)
        divided = dict(lengths)
        place(others)
        return cls(tuple(fields), lengths, divided)

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """The byte at which each vector starts in a block that holds them all."""
        result = {}
        start = 0
        for dtype, length in self.lengths.items():
            result[dtype] = start
            start += length * np.dtype(dtype).itemsize
        return result

    @cached_property
    def nbytes(self) -> int:
        """The size of a block that holds every vector."""
        return sum(length * np.dtype(dtype).itemsize for dtype, length in self.lengths.items())

    def slices(self, count: int) -> list[dict[str, tuple[int, int]]]:
        """Every vector cut into `count` contiguous ranges of whole 512-byte lines, all but the last ones of one size.

        >>> Layout.of([("w", "float32", (300,))], []).slices(2)
        [{'float32': (0, 256)}, {'float32': (256, 384)}]
        """
        result: list[dict[str, tuple[int, int]]] = [{} for _ in range(count)]
        for dtype, length in self.lengths.items():
            line = ALIGNMENT // np.dtype(dtype).itemsize
            size = -(-length // (line * count)) * line
            for index, ranges in enumerate(result):
                ranges[dtype] = (min(index * size, length), min((index + 1) * size, length))
        return result
