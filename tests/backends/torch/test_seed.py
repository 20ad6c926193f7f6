"""The run's seed follows from torch's, so a study over `torch.manual_seed` varies every random number."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import lockstep

X = torch.randn(150, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (150,), generator=torch.Generator().manual_seed(2))
WEIGHT = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))

SCRIPT = """
import sys, torch, lockstep
from torch import nn
torch.manual_seed(int(sys.argv[1]))
net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
x, y = torch.randn(150, 6), torch.randint(3, (150,))
trainer = lockstep.wrap(
    net, torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), devices=int(sys.argv[2]), shards=4, threads=1
)
trainer.fit((x, y), epochs=2, batch_size=32, verbose=0)
print(trainer.digest(), trainer.opening.rpartition("seed ")[2])
"""


def wrapped(dropout=0.0, devices=1, **options):
    """Always the same weights, and nothing drawn for them."""
    before = torch.get_rng_state()
    net = nn.Sequential(nn.Dropout(dropout), nn.Linear(6, 3))
    net[1].load_state_dict({"weight": WEIGHT, "bias": torch.zeros(3)})
    torch.set_rng_state(before)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"shards": 4, "threads": 1, **options}
    return lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=devices, **options)


def digest(torchs, dropout=0.0, shuffle=True, **options):
    torch.manual_seed(torchs)
    with wrapped(dropout, **options) as trainer:
        trainer.fit((X, Y), epochs=1, batch_size=30, shuffle=shuffle, verbose=0)
        return trainer.digest()


@pytest.mark.parametrize(("dropout", "shuffle"), [(0.5, False), (0.0, True)], ids=["dropout", "order"])
def test_the_run_depends_on_torchs_seed(dropout, shuffle):
    found = [digest(seed, dropout, shuffle) for seed in (0, 1, 1)]
    assert found[0] != found[1] == found[2]
    assert digest(1, dropout, shuffle, seed=0) == found[0]  # what is given counts more


@pytest.mark.parametrize(("seed", "devices"), [(-1, 2), (-(2**63), 1), (2**64 - 1, 1), (2**40, 1)])
def test_every_seed_of_torchs(seed, devices, tmp_path):
    torch.manual_seed(seed)
    with wrapped(0.5) as trainer:
        trainer.fit((X, Y), epochs=1, batch_size=30, checkpoint=tmp_path, verbose=0)
        assert trainer.opening.endswith(f"seed {seed % 2**64}")
    torch.manual_seed(7)
    with wrapped(0.5, devices=devices) as trainer:  # the checkpoint's counts
        trainer.fit((X, Y), epochs=2, batch_size=30, checkpoint=tmp_path, verbose=0)
        found = trainer.digest()
    torch.manual_seed(seed)
    with wrapped(0.5) as trainer:
        trainer.fit((X, Y), epochs=2, batch_size=30, verbose=0)
        assert trainer.digest() == found


def test_the_scripts_own_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with wrapped(0.5) as trainer:
        trainer.fit((X, Y), epochs=1, batch_size=30, verbose=0)
        assert torch.initial_seed() == 3  # so that another trainer of this script has it too
        with wrapped(0.5) as other:
            assert other.session.run.seed == trainer.session.run.seed == 3
    assert torch.equal(torch.rand(4), expected)


def test_fresh_processes_and_any_number_of_devices_agree():
    def ran(seed, devices):
        command = [sys.executable, "-c", SCRIPT, str(seed), str(devices)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()

    found = [ran(5, devices) for devices in (1, 2)]
    assert found[0][1] == "5"
    assert found[0] == found[1]
