"""A test of this room leaves no descriptor open."""

import gc
import os
from collections.abc import Iterator

import pytest


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
