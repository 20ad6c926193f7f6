"""Fixtures: every test in this folder must close all descriptors that it opens."""

import gc
import os
from collections.abc import Iterator

import pytest

from lockstep.launch.shm import Region


@pytest.fixture(autouse=True, scope="module")
def forked_workers() -> None:
    """No worker is a copy here, where the tests ask how Lockstep starts one."""


@pytest.fixture(autouse=True)
def closes_every_descriptor() -> Iterator[None]:
    before = descriptors()
    yield
    if descriptors() != before:
        gc.collect()
    assert descriptors() == before


def descriptors() -> dict[str, str]:
    """Every open descriptor and what it is, less the listing itself."""
    result = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            result[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
    return result


@pytest.fixture
def region(closes_every_descriptor: None) -> Iterator[Region]:
    region = Region.create("test")
    yield region
    region.close()
