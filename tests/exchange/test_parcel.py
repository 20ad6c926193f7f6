"""Objects that travel: arrays through the region, the rest through the link."""

import numpy as np
import pytest

from lockstep.exchange import parcel

GRID = np.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"step": 3, "name": "plain"},
        GRID,
        (GRID, {"y": np.arange(4), "names": ["a", "b"]}, [np.float32(2)]),
        GRID.T,  # Fortran order
        GRID[:, ::2],  # not contiguous
        GRID[1:3],
        np.empty((0, 5)),
        np.array(7),
        np.array(["text", None], object),
        np.arange(10_000),
        [np.arange(3, dtype=np.int8), np.arange(5, dtype=np.int16)],  # sizes that are no multiple of a line
    ],
    ids=str,
)
def test_a_value_arrives_as_it_left(region, value):
    (message,) = parcel.pack([value], region)
    np.testing.assert_equal(parcel.unpack(message, region), value)


def test_several_parcels_do_not_overlap(region):
    values = [np.full(size, size) for size in (1, 7, 100, 3000, 2)]
    messages = parcel.pack(values, region)
    for message, value in zip(messages, values, strict=True):
        np.testing.assert_equal(parcel.unpack(message, region), value)


def test_arrays_do_not_go_through_the_link(region):
    (message,) = parcel.pack([(np.zeros(100_000), "rest")], region)
    assert len(message) < 1000


def test_what_arrives_is_read_only_and_lies_in_the_region(region):
    (message,) = parcel.pack([np.zeros(8)], region)
    arrived = parcel.unpack(message, region)
    with pytest.raises(ValueError, match="read-only"):
        arrived[0] = 1
    region.view(1)[:8] = np.float64(5).tobytes()
    assert arrived[0] == 5


def test_what_is_kept_may_be_written_to_and_stays_what_it_was(region):
    (message,) = parcel.pack([(np.arange(4.0), "rest")], region)
    kept, _ = parcel.keep(message, region)
    kept[0] = 7
    assert parcel.unpack(message, region)[0].tolist() == [0, 1, 2, 3]
    assert kept.tolist() == [7, 1, 2, 3]
    assert parcel.keep(parcel.pack(["plain"], region)[0], region) == "plain"


def test_a_larger_parcel_makes_the_region_grow(region):
    (small,) = parcel.pack([np.arange(4)], region)
    assert parcel.unpack(small, region).tolist() == [0, 1, 2, 3]
    big = np.arange(1 << 17)
    (message,) = parcel.pack([big], region)
    np.testing.assert_equal(parcel.unpack(message, region), big)
