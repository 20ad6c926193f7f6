"""What `devices=` means."""

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
        (["cuda"], [], "Every device must be there. Got 'cuda:0'; this host has only the CPU. Name one of these."),
    ],
)
def test_errors(devices, available, message):
    with pytest.raises(DeviceError) as caught:
        resolve(devices, available)
    assert str(caught.value) == message
