"""Anonymous shared memory, and pickles whose arrays are stored in it."""

import os

import numpy as np
import pytest

from lockstep.errors import PlatformError, WorkerError
from lockstep.launch import shm
from lockstep.launch.shm import PAGE, Region

GRID = np.arange(24.0).reshape(4, 6)


def test_a_region_grows_and_earlier_views_show_the_same_memory(region):
    small = region.view(10)
    small[:4] = b"left"
    large = region.view(3 * PAGE + 1)
    assert len(large) >= 3 * PAGE + 1
    assert bytes(large[:4]) == b"left"
    large[4:9] = b"right"
    assert bytes(small[:9]) == b"leftright"


def test_two_ends_share_the_memory_whichever_end_grew_it(region):
    other = Region(os.dup(region.descriptor))
    region.view(PAGE)[:3] = b"one"
    other.view(5 * PAGE)[4 * PAGE : 4 * PAGE + 3] = b"two"
    assert bytes(other.view(3)[:3]) == b"one"
    assert bytes(region.view(5 * PAGE)[4 * PAGE : 4 * PAGE + 3]) == b"two"
    other.close()


def test_a_smaller_view_does_not_shrink_the_region(region):
    region.view(4 * PAGE)
    region.view(1)
    assert os.fstat(region.descriptor).st_size == 4 * PAGE


def test_close_is_idempotent(region):
    descriptor = region.descriptor
    region.close()
    region.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_view_outlives_its_region(region):
    view = region.view(4)
    view[:4] = b"kept"
    region.close()
    assert bytes(view[:4]) == b"kept"


def test_opening_a_region_that_another_process_holds(region):
    region.view(PAGE)[:4] = b"here"
    other = Region.open_from_process(os.getpid(), region.descriptor)
    assert bytes(other.view(4)[:4]) == b"here"
    other.close()
    with pytest.raises(WorkerError, match=r"Cannot open the shared memory of process \d+: "):
        Region.open_from_process(os.getpid(), 10_000)


def test_writes_to_a_private_view_are_not_seen_by_others(region):
    region.view(PAGE)[:4] = b"here"
    own = region.view_private(4)
    own[:4] = b"mine"
    assert bytes(region.view(4)[:4]) == b"here"
    assert bytes(own[:4]) == b"mine"


def test_a_platform_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(PlatformError) as caught:
        Region.create("leaves")
    assert str(caught.value) == (
        "Replicas in several processes need Linux's memfd_create, which this platform does not have. Use devices=1."
    )


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
def test_a_value_is_unpacked_as_it_was_packed(region, value):
    (message,) = shm.pack([value], region)
    np.testing.assert_equal(shm.unpack(message, region), value)


def test_values_packed_together_do_not_overlap(region):
    values = [np.full(size, size) for size in (1, 7, 100, 3000, 2)]
    messages = shm.pack(values, region)
    for message, value in zip(messages, values, strict=True):
        np.testing.assert_equal(shm.unpack(message, region), value)


def test_messages_do_not_contain_the_arrays(region):
    (message,) = shm.pack([(np.zeros(100_000), "rest")], region)
    assert len(message) < 1000


def test_unpacked_arrays_are_read_only_views_of_the_region(region):
    (message,) = shm.pack([np.zeros(8)], region)
    arrived = shm.unpack(message, region)
    with pytest.raises(ValueError, match="read-only"):
        arrived[0] = 1
    region.view(1)[:8] = np.float64(5).tobytes()
    assert arrived[0] == 5


def test_writes_to_privately_unpacked_arrays_stay_in_this_process(region):
    (message,) = shm.pack([(np.arange(4.0), "rest")], region)
    kept, _ = shm.unpack_private(message, region)
    kept[0] = 7
    assert shm.unpack(message, region)[0].tolist() == [0, 1, 2, 3]
    assert kept.tolist() == [7, 1, 2, 3]
    assert shm.unpack_private(shm.pack(["plain"], region)[0], region) == "plain"


def test_packing_a_larger_value_makes_the_region_grow(region):
    (small,) = shm.pack([np.arange(4)], region)
    assert shm.unpack(small, region).tolist() == [0, 1, 2, 3]
    big = np.arange(1 << 17)
    (message,) = shm.pack([big], region)
    np.testing.assert_equal(shm.unpack(message, region), big)
