"""Fixtures: several members of an exchange in one process, one thread each."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest

from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch.shm import Region
from lockstep.training.step import Member
from processes.fake_workers import FakeWorld


@pytest.fixture
def resources():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def region(resources):
    region = Region.create("test")
    resources.callback(region.close)
    return region


@pytest.fixture
def open_world(resources):
    """A function that creates a controller with workers that are threads."""

    def make(count, **options):
        world = FakeWorld(count, **options)
        resources.callback(world.close)
        return world

    return make


@pytest.fixture
def members(resources, region):
    """A function that creates members of a world over the given backends; they share one region."""

    def make(world, backends):
        result = []
        for seat, (backend, end) in enumerate(zip(backends, world.ends, strict=True)):
            own = Region(os.dup(region.descriptor))
            resources.callback(own.close)
            open_exchange = partial(SharedMemoryExchange, backend, own, end, seat=seat)
            # Each has a turn of its own, because they wait for each other.
            result.append(Member(backend, open_exchange, [seat], turn=nullcontext()))
        return result

    return make


@pytest.fixture
def together():
    """A function that calls all functions at once and returns what each returned or raised."""

    def run(functions):
        def outcome(function):
            try:
                return function()
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(outcome, functions, timeout=240))

    return run
