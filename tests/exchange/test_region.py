"""Anonymous shared memory."""

import os

import pytest

from lockstep.errors import PlatformError, WorkerError
from lockstep.exchange.region import PAGE, Region


def test_a_region_grows_and_earlier_views_show_the_same_memory(region):
    small = region.view(10)
    small[:4] = b"left"
    large = region.view(3 * PAGE + 1)
    assert len(large) >= 3 * PAGE + 1
    assert bytes(large[:4]) == b"left"
    large[4:9] = b"right"
    assert bytes(small[:9]) == b"leftright"


def test_two_ends_share_the_memory_whoever_made_it_larger(region):
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


def test_closing_twice(region):
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


def test_a_region_that_another_process_holds(region):
    region.view(PAGE)[:4] = b"here"
    other = Region.of_process(os.getpid(), region.descriptor)
    assert bytes(other.view(4)[:4]) == b"here"
    other.close()
    with pytest.raises(WorkerError, match=r"Shared memory is opened while process \d+ holds it\."):
        Region.of_process(os.getpid(), 10_000)


def test_what_is_ones_own_is_not_seen_by_others(region):
    region.view(PAGE)[:4] = b"here"
    own = region.own(4)
    own[:4] = b"mine"
    assert bytes(region.view(4)[:4]) == b"here"
    assert bytes(own[:4]) == b"mine"


def test_a_platform_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(PlatformError) as caught:
        Region.create("leaves")
    assert str(caught.value) == (
        "Several replicas in processes need Linux's memfd, which this platform does not have. Use devices=1."
    )
