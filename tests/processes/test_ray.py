"""Workers of Ray Train: joined by their process group, refused without one."""

import sys
import types

import pytest

from lockstep.errors import LaunchError
from lockstep.processes import rendezvous


def ray(world_size):
    module = types.ModuleType("ray.train")
    module.get_context = lambda: types.SimpleNamespace(get_world_size=world_size)
    return module


def outside():
    raise RuntimeError("`get_world_size` can only be called inside a training function")


@pytest.mark.parametrize("world_size", [lambda: 1, outside])
def test_one_worker_or_the_driver_is_no_launch(world_size, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train", ray(world_size))
    assert not rendezvous.is_launched()


def test_several_workers_without_a_group_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train", ray(lambda: 2))
    with pytest.raises(
        LaunchError, match=r"This is one of 2 workers of Ray Train without a group\. Use ray\.train\.torch\.Tor"
    ):
        rendezvous.is_launched()
