"""The layout of arrays in flat vectors: aligned, disjoint, and sliced without gaps."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.layout import ALIGNMENT, Layout

DTYPES = ("float32", "float64", "int64")
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
arrays = st.lists(st.tuples(st.uuids().map(str), st.sampled_from(DTYPES), shapes), max_size=8)


def itemsize(dtype):
    return np.dtype(dtype).itemsize


@given(arrays, arrays)
def test_fields_are_aligned_and_do_not_overlap(gradients, others):
    layout = Layout.build(gradients, others)
    assert [(field.name, field.dtype, field.shape) for field in layout.fields] == gradients + others
    for dtype, length in layout.lengths.items():
        fields = [field for field in layout.fields if field.dtype == dtype]
        assert all(field.offset * itemsize(dtype) % ALIGNMENT == 0 for field in fields)
        ends = [field.offset + field.size for field in fields]
        assert all(end <= field.offset for end, field in zip(ends[:-1], fields[1:], strict=True))
        assert ends[-1] <= length


@given(arrays, arrays)
def test_only_gradients_are_divided(gradients, others):
    layout = Layout.build(gradients, others)
    for index, field in enumerate(layout.fields):
        end = layout.divided.get(field.dtype, 0)
        assert field.offset + field.size <= end if index < len(gradients) else field.offset >= end


@given(arrays, arrays)
def test_vectors_are_adjacent_in_a_buffer(gradients, others):
    layout = Layout.build(gradients, others)
    ends = [layout.starts[dtype] + length * itemsize(dtype) for dtype, length in layout.lengths.items()]
    assert [*layout.starts.values(), layout.nbytes] == [0, *ends]
    assert all(start % ALIGNMENT == 0 for start in layout.starts.values())


@given(arrays, arrays, st.integers(1, 9))
def test_slices_partition_every_vector_into_multiples_of_512_bytes(gradients, others, count):
    layout = Layout.build(gradients, others)
    slices = layout.slices(count)
    assert len(slices) == count
    for dtype, length in layout.lengths.items():
        ranges = [each[dtype] for each in slices]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == length
        assert all(left[1] == right[0] for left, right in pairwise(ranges))
        sizes = [(stop - start) * itemsize(dtype) for start, stop in ranges]
        assert all(size % ALIGNMENT == 0 for size in sizes)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - length * itemsize(dtype) / count < ALIGNMENT  # nobody has more than a line too much
