"""Numbers in containers and objects that modules have as attributes: refused if passes change them."""

from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ExactError

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)) + 1
Y = torch.arange(24) % 3


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.prepare()


class InDict(Base):
    def prepare(self):
        self.stats = {"passes": 0}

    def forward(self, x):
        self.stats["passes"] += 1
        return self.layer(x * (1 + 0.01 * self.stats["passes"]))


class InOrderedDict(InDict):
    def prepare(self):
        self.stats = OrderedDict(passes=0)


class InNumpy(InDict):
    def prepare(self):
        self.stats = {"passes": np.float64(0)}


class InList(Base):
    def prepare(self):
        self.stats = [0]

    def forward(self, x):
        self.stats[0] += 1
        return self.layer(x * (1 + 0.01 * self.stats[0]))


class InTuple(Base):
    def prepare(self):
        self.stats = (0, "passes")

    def forward(self, x):
        self.stats = (self.stats[0] + 1, "passes")
        return self.layer(x * (1 + 0.01 * self.stats[0]))


class InDeque(Base):
    def prepare(self):
        self.means = deque(maxlen=3)

    def forward(self, x):
        self.means.append(x.mean().item())
        return self.layer(x - sum(self.means))


class Box:
    passes = 0


class InObject(Base):
    def prepare(self):
        self.box = Box()

    def forward(self, x):
        self.box.passes += 1
        return self.layer(x * (1 + 0.01 * self.box.passes))


class Sizes(Base):
    """Leaves the same numbers for every shard."""

    def prepare(self):
        self.sizes, self.shape, self.box = {"width": 0}, (), Box()

    def forward(self, x):
        self.sizes["width"], self.shape, self.box.passes = x.shape[1], x.shape[1:], len(x.shape)
        return self.layer(x)


def wrapped(make, devices=1, **options):
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=4, threads=1, **options)


STATEFUL = [
    (InDict, "'passes' of 'stats' of InDict"),
    (InOrderedDict, "'passes' of 'stats' of InOrderedDict"),
    (InNumpy, "'passes' of 'stats' of InNumpy"),
    (InList, "'stats' of InList"),
    (InTuple, "'stats' of InTuple"),
    (InDeque, "'means' of InDeque"),
    (InObject, "'passes' of 'box' of InObject"),
]


@pytest.mark.parametrize(("make", "where"), STATEFUL)
def test_a_number_that_passes_change_is_refused(make, where):
    with wrapped(make) as trainer:
        before = trainer.digest()
        with pytest.raises(ExactError) as caught:
            trainer.step((X, Y))
        assert f"has left in {where}: " in str(caught.value)
        assert "Make it a buffer" in str(caught.value)
        assert trainer.digest() == before


def test_a_number_that_is_the_same_for_every_shard_may_be_left():
    found = set()
    for devices in (1, 2):
        with wrapped(Sizes, devices) as trainer:
            assert len(trainer.devices) == devices
            for _ in range(3):
                trainer.step((X, Y))
                trainer.evaluate((X, Y))
            found.add(trainer.digest())
    assert len(found) == 1


def test_such_a_model_trains_if_not_exact():
    trainer = wrapped(InDict, exact=False)
    trainer.step((X, Y))
    assert trainer.model.stats == {"passes": 4}
