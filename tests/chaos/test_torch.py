"""A sample on torch: a model with dropout and batch norm, Adam, and processes that are killed."""

import pytest
import torch

import lockstep
from chaos.harness import DATA, SHARDS, Chaos, Fault, Undisturbed


def wrap_torch(devices, saboteur=None):
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Linear(DATA[0].shape[1], 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16, 3),
    ).double()
    net.saboteur = saboteur
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return lockstep.wrap(net, optimizer, torch.nn.CrossEntropyLoss(), devices=devices, shards=SHARDS)


@pytest.mark.parametrize("devices", [2, 3])
def test_killed_workers(devices, tmp_path):
    with Chaos(tmp_path, devices, Undisturbed(wrap_torch), wrap_torch) as chaos:
        for index, point in enumerate(("step, in a shard", "step, slice ready", "step, committed")):
            chaos.order(Fault(point, "kill", 1 + index % (devices - 1)))
            chaos.check_faults("kill")
