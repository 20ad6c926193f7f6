"""Processes that share memory with some of the others or none give the bits of one process.

One world of three processes and eight shards, so that their ranges are no nodes of the tree. What a process calls its
host is set here: all on one, two on one, each on one of its own.
"""

import pytest

from integration.run_script import together
from integration.test_launched import by_hand, by_story, outputs

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import atexit, os

def print_threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    print("threads of groups:", *[name.strip() for name in names if "gloo" in name], flush=True)

atexit.register(print_threads)  # which runs after what Lockstep registers
import numpy as np
import torch
from torch import nn
import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.processes import launched

index = int(os.environ.get("RANK", 0))
generator = np.random.default_rng(1)
x, y = generator.standard_normal((61, 11)).astype("float32"), generator.integers(0, 4, 61)

def train(trainer, cast, change, *counts):
    with trainer:
        for count in counts:
            trainer.step((cast(x)[:count], cast(y)[:count]))
        if index == 0:
            change()  # the others have computed a step without it, and make it again
        for _ in range(2):
            logs = trainer.step((cast(x), cast(y)))
        trainer.fit((cast(x), cast(y)), batch_size=61, verbose=2)
        return logs["loss"].hex(), trainer.digest()

def train_numpy():
    model, optimizer = Dense([11, 900, 4], seed=1 + index, dtype="float32", dropout=0.3), SGD(0.1, momentum=0.9)
    trainer = lockstep.wrap(model, optimizer, "cross_entropy", shards=8, devices=1)
    return train(trainer, np.asarray, lambda: setattr(optimizer, "lr", 0.5), 61, 5, 61)  # fewer examples than shards

def train_torch():
    torch.manual_seed(1 + index)
    net = nn.Sequential(nn.Linear(11, 900), nn.BatchNorm1d(900), nn.ReLU(), nn.Dropout(0.3), nn.Linear(900, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss(ignore_index=3)  # whose gradient is divided after the tree
    trainer = lockstep.wrap(net, optimizer, loss, shards=8, devices=1, threads=1, seed=0)
    return train(trainer, torch.as_tensor, lambda: net[4].weight.data.mul_(0.5), 61, 50)

for hosts in os.environ["HOSTS"].split():
    launched.describe_host = lambda: hosts[index]
    print("result", "numpy", *train_numpy(), flush=True)
    print("result", "torch", *train_torch(), flush=True)
"""


def test_processes_of_one_two_and_three_hosts_give_the_bits_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTS", "x")
    alone = by_story(outputs(SCRIPT, tmp_path))
    hosts = ["aaa", "aba", "abc"]
    variables = [each | {"HOSTS": " ".join(hosts)} for each in by_hand(3)]
    with together(SCRIPT, tmp_path, variables) as scripts:
        ends = [script.end() for script in scripts]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    routes = [line.rpartition("sums ")[2] for line in ends[0][1].splitlines() if ", sums " in line]
    assert (
        routes[::2]
        == routes[1::2]
        == [
            "added in shared memory",
            "added within 2 groups of processes in shared memory, then between them",
            "sent from every process to every other",
        ]
    )
    for _, stdout, _ in ends:
        assert by_story(stdout) == {name: words * len(hosts) for name, words in alone.items()}
        # One that frees a tensor while the interpreter exits aborts the process.
        assert "threads of groups:" in stdout.splitlines()
