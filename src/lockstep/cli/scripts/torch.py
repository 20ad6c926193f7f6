"""The PyTorch scripts of `demo` and `verify`: Lockstep's, and the same with DistributedDataParallel for comparison."""

from lockstep.cli.scripts.base import Peer, Scripts

_TRAIN = """\
import sys

from torch import manual_seed, nn, optim

import lockstep
from lockstep.datasets import digits

train, test = digits()
manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
sgd = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
trainer = lockstep.wrap(net, sgd, nn.CrossEntropyLoss(), metrics=["accuracy"], devices=sys.argv[1:] or None)
history = trainer.fit(train, epochs=10, batch_size=256, validation_data=test)
history.to_csv("history.csv")
print(trainer.digest())
"""

# The same model, optimizer, batch and number of epochs, as one writes it for DistributedDataParallel. Every epoch's
# order is that of DistributedSampler; examples are gathered by index, as Lockstep does, so that the times compare.
_DDP = """\
import csv
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed, manual_seed, nn, optim
from torch.utils.data import DistributedSampler

from lockstep.datasets import digits


def main(rank, world):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no need to look up its name
    store = Path("store").resolve().as_uri()
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    (x, y), (xt, yt) = [map(torch.from_numpy, part) for part in digits()]
    manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    sampler = DistributedSampler(x, world, rank)
    rows = []
    for epoch in range(10):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        for index in torch.tensor(list(sampler)).split(256 // world):
            optimizer.zero_grad()
            loss(model(x[index]), y[index]).backward()
            optimizer.step()
        seconds = time.perf_counter() - started
        net.eval()
        with torch.no_grad():
            accuracy = (net(xt).argmax(1) == yt).double().mean().item()
        rows.append({"epoch": epoch, "seconds": seconds, "val_accuracy": accuracy})
    if rank == 0:
        with open("history.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        digest = hashlib.sha256()
        for tensor in [*net.state_dict().values(), *(slot["momentum_buffer"] for slot in optimizer.state.values())]:
            digest.update(tensor.numpy().tobytes())
        print(digest.hexdigest())
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may abort a process that exits by itself


if __name__ == "__main__":
    world = int(sys.argv[1])
    torch.multiprocessing.spawn(main, (world,), nprocs=world)
"""

# What `lockstep verify` checks when it is given no script.
_VERIFY = """\
from torch import manual_seed, nn, optim

import lockstep
from lockstep.datasets import digits


def make_trainer(devices, shards):
    manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 84), nn.ReLU(), nn.Dropout(0.25), nn.Linear(84, 10),
    )
    optimizer = optim.Adam(net.parameters(), lr=1e-3)
    trainer = lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=shards)
    return trainer, digits()[0]
"""

SCRIPTS = Scripts("train.py", _TRAIN, _VERIFY, Peer("DDP", "processes", "ddp.py", _DDP))
