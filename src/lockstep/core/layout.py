"""The layout: where each array is in the flat vectors of a partial sum.

A partial sum is one vector per accumulation type. Every array starts at a multiple of 512 bytes, because kernels choose
their code path by alignment, and different paths can give different bits. The layout depends on the model only, never
on the number of devices.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

ALIGNMENT = 512


@dataclass(frozen=True)
class Field:
    """One array of a partial sum: `size` elements of the vector `dtype`, from element `offset` on."""

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
    """The arrays of a partial sum: first the gradients, which one division scales, then the rest.

    >>> layout = Layout.build(gradients=[("w", "float32", (3,))], others=[("mean", "float32", (2,))])
    >>> [(field.name, field.offset) for field in layout.fields], layout.lengths, layout.divided
    ([('w', 0), ('mean', 128)], {'float32': 256}, {'float32': 128})
    """

    fields: tuple[Field, ...]
    lengths: Mapping[str, int]
    divided: Mapping[str, int]

    @classmethod
    def build(
        cls,
        gradients: Iterable[tuple[str, str, tuple[int, ...]]],
        others: Iterable[tuple[str, str, tuple[int, ...]]],
    ) -> "Layout":
        """Lays out arrays, given as (name, dtype, shape), one after another."""
        fields: list[Field] = []
        lengths: dict[str, int] = {}

        def append(arrays: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
            for name, dtype, shape in arrays:
                start = lengths.setdefault(dtype, 0)
                fields.append(Field(name, dtype, shape, start))
                step = ALIGNMENT // np.dtype(dtype).itemsize
                lengths[dtype] = start + -(-max(prod(shape), 1) // step) * step

        append(gradients)
        divided = dict(lengths)
        append(others)
        return cls(tuple(fields), lengths, divided)

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """The byte at which each vector starts in a buffer of all vectors."""
        result = {}
        start = 0
        for dtype, length in self.lengths.items():
            result[dtype] = start
            start += length * np.dtype(dtype).itemsize
        return result

    @cached_property
    def nbytes(self) -> int:
        """The size of a buffer of all vectors."""
        return sum(length * np.dtype(dtype).itemsize for dtype, length in self.lengths.items())

    def slices(self, count: int) -> list[dict[str, tuple[int, int]]]:
        """Splits every vector into `count` ranges of multiples of 512 bytes, all of one size except the last ones.

        >>> Layout.build([("w", "float32", (300,))], []).slices(2)
        [{'float32': (0, 256)}, {'float32': (256, 384)}]
        """
        result: list[dict[str, tuple[int, int]]] = [{} for _ in range(count)]
        for dtype, length in self.lengths.items():
            line = ALIGNMENT // np.dtype(dtype).itemsize
            size = -(-length // (line * count)) * line
            for index, ranges in enumerate(result):
                ranges[dtype] = (min(index * size, length), min((index + 1) * size, length))
        return result
