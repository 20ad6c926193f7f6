"""What `devices=` means."""

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
        (0, [], "Training needs at least one device. Got devices=0. Use devices=1 or more."),
        (-2, GPUS, "Training needs at least one device. Got devices=-2. Use devices=1 or more."),
        (
            3,
            GPUS,
            "Every device must be there. Got devices=3; this host has 2: cuda:0, cuda:1. "
            "Use devices=2, or devices=['cpu'] * 3.",
        ),
        ([], [], "Training needs at least one device. Got an empty list. Use devices=None for all."),
        (["cpu", "cuda:0"], GPUS, "Devices are all of one type, for bits are. Got cpu, cuda:0. Use one type."),
        (
            "cuda:2",
            GPUS,
            "Every device must be there. Got 'cuda:2'; this host has cuda:0, cuda:1. Name one of these.",
        ),
        (
            2.0,
            [],
            "Devices are a count, a list of names, or None for every accelerator. Got devices=2.0. "
            "Use for example devices=2, or devices=['cpu:0', 'cpu:1'].",
        ),
        (
            [0, 1],
            [],
            "Devices are a count, a list of names, or None for every accelerator. Got devices=[0, 1]. "
            "Use for example devices=2, or devices=['cpu:0', 'cpu:1'].",
        ),
        (["cuda"], [], "Every device must be there. Got 'cuda:0'; this host has only the CPU. Name one of these."),
    ],
)
def test_errors(devices, available, message):
    with pytest.raises(DeviceError) as caught:
        resolve(devices, available)
    assert str(caught.value) == message


class Chip:
    """A framework's own device object."""

    place = "CUDA:1"


def test_a_frameworks_own_devices_go_by_their_names():
    assert resolve([Chip(), "cuda:0"], GPUS, lambda chip: chip.place) == ("cuda:1", "cuda:0")
    assert resolve(Chip(), GPUS, lambda chip: chip.place) == ("cuda:1",)
    with pytest.raises(DeviceError, match=r"a list of names, .* Got devices=\[<"):
        resolve([object()], GPUS, lambda chip: chip.place)
