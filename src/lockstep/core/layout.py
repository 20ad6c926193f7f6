"""The layout of a partial sum: which part of its flat vectors holds which array.

A partial sum has one flat vector for each accumulation type. Every array starts at a multiple of 512 bytes, because
kernels choose their code path by alignment, and different paths can give different bits. The layout depends only on the
model, never on the number of devices.
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
    """The positions of all arrays of a partial sum: first the gradients, then the other arrays.

    `lengths` is the length of each vector, and `divided` the length of its first part, which holds the gradients and is
    divided by the weight of the batch. `num_sums` is the length of the separate vector with the sums of loss and
    metrics.

    >>> layout = Layout.build(gradients=[("w", "float32", (3,))], others=[("mean", "float32", (2,))])
    >>> [(field.name, field.offset) for field in layout.fields], layout.lengths, layout.divided
    ([('w', 0), ('mean', 128)], {'float32': 256}, {'float32': 128})
    """

    fields: tuple[Field, ...]
    lengths: Mapping[str, int]
    divided: Mapping[str, int]
    num_sums: int = 0

    @classmethod
    def build(
        cls,
        gradients: Iterable[tuple[str, str, tuple[int, ...]]],
        others: Iterable[tuple[str, str, tuple[int, ...]]],
        num_sums: int = 0,
    ) -> "Layout":
        """Returns the layout that places these arrays, given as (name, dtype, shape), one after another.

        `gradients` are divided by the batch's weight and come first; `others` are the running statistics.
        """
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
        return cls(tuple(fields), lengths, divided, num_sums)

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """The byte offset of each vector in a buffer that holds all vectors."""
        result = {}
        start = 0
        for dtype, length in self.lengths.items():
            result[dtype] = start
            start += length * np.dtype(dtype).itemsize
        return result

    @cached_property
    def nbytes(self) -> int:
        """The size in bytes of a buffer that holds all vectors."""
        return sum(length * np.dtype(dtype).itemsize for dtype, length in self.lengths.items())

    def slices(self, count: int) -> list[dict[str, tuple[int, int]]]:
        """Splits every vector into `count` ranges, returned as (start, stop) by type for each slice.

        All ranges are equally long multiples of 512 bytes; only the last ranges may be shorter or empty.

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
