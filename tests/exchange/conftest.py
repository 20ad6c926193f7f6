"""Fixtures: several members of an exchange in one process, one thread each."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest

from lockstep.exchange.barrier import Barrier
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch.shm import Region
from lockstep.training.step import Member


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
def barriers(resources):
    """A function that creates a barrier of `count` members and returns their ends."""

    def make(count, watched=()):
        control = Region.create("control")
        resources.callback(control.close)
        events = [os.eventfd(0) for _ in range(count)]
        for event in events:
            resources.callback(os.close, event)
        return [Barrier(index, control, events, watched if index == 0 else ()) for index in range(count)]

    return make


@pytest.fixture
def members(resources, region, barriers):
    """A function that creates members over the given backends that share one region."""

    def make(backends):
        result = []
        for index, (backend, barrier) in enumerate(zip(backends, barriers(len(backends)), strict=True)):
            own = Region(os.dup(region.descriptor))
            resources.callback(own.close)
            open_exchange = partial(SharedMemoryExchange, backend, own, barrier, index=index)
            # Each has a turn of its own, because they wait for each other.
            result.append(Member(backend, open_exchange, [index], turn=nullcontext()))
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
