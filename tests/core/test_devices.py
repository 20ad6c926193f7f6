"""The meaning of `devices=`."""

import numpy as np
import pytest

from lockstep.devices import resolve
from lockstep.errors import DeviceError

GPUS = ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("devices", "available", "expected"),
    [
        (None, [], ("cpu:0",)),
        (None, GPUS, ("cuda:0", "cuda:1")),
        (1, [], ("cpu:0",)),
        (3, [], ("cpu:0", "cpu:1", "cpu:2")),
        (1, GPUS, ("cuda:0",)),
        ("cpu", GPUS, ("cpu:0",)),
        ("cuda:1", GPUS, ("cuda:1",)),
        ("cuda", GPUS, ("cuda:0",)),
        (["cpu"] * 3, GPUS, ("cpu:0", "cpu:1", "cpu:2")),
        (["cpu:0"] * 2, [], ("cpu:0", "cpu:1")),  # one CPU carries any number of replicas
        (["cpu:3", "cpu:1"], [], ("cpu:3", "cpu:1")),
        (np.int64(2), [], ("cpu:0", "cpu:1")),
        ("CPU:0", [], ("cpu:0",)),  # as TensorFlow writes it
        (("cuda:1", "cuda:0"), GPUS, ("cuda:1", "cuda:0")),
        (["cuda:0", "cuda:0"], GPUS, ("cuda:0", "cuda:0")),  # two replicas on one GPU
    ],
)
def test_resolve(devices, available, expected):
    assert resolve(devices, available) == expected


@pytest.mark.parametrize(
    ("devices", "available", "message"),
    [
        (0, [], "devices=0 leaves no device to train on. Use devices=1 or more."),
        (-2, GPUS, "devices=-2 leaves no device to train on. Use devices=1 or more."),
        (
            3,
            GPUS,
            "devices=3 is more than the 2 accelerators of this host: cuda:0, cuda:1. Use devices=2, or "
            "devices=['cpu'] * 3.",
        ),
        ([], [], "devices=[] leaves no device to train on. Use devices=None for all accelerators."),
        (
            ["cpu", "cuda:0"],
            GPUS,
            "All devices must be of the same type. Got cpu, cuda:0. Use devices of one type only.",
        ),
        (
            "cuda:2",
            GPUS,
            "This host has no device 'cuda:2'. Use one of its devices: cuda:0, cuda:1.",
        ),
        (
            2.0,
            [],
            "devices=2.0 must be a number, a list of names, or None for all accelerators. Use for example "
            "devices=2, or devices=['cpu:0', 'cpu:1'].",
        ),
        (
            [0, 1],
            [],
            "devices=[0, 1] must be a number, a list of names, or None for all accelerators. Use for example "
            "devices=2, or devices=['cpu:0', 'cpu:1'].",
        ),
        (["cuda"], [], "This host has no device 'cuda:0'. Use one of its devices: cpu:0."),
    ],
)
def test_invalid_values_are_refused(devices, available, message):
    with pytest.raises(DeviceError) as caught:
        resolve(devices, available)
    assert str(caught.value) == message


class Chip:
    """A framework's own device object."""

    place = "CUDA:1"


def test_device_objects_of_a_framework_are_resolved_by_name():
    assert resolve([Chip(), "cuda:0"], GPUS, lambda chip: chip.place) == ("cuda:1", "cuda:0")
    assert resolve(Chip(), GPUS, lambda chip: chip.place) == ("cuda:1",)
    with pytest.raises(DeviceError, match=r"devices=\[<.*must be a number, a list of names"):
        resolve([object()], GPUS, lambda chip: chip.place)
