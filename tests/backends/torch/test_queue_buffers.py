"""Float buffers that are queues are refused, because their average over the shards has no meaning."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import ModelError

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)) + 1
Y = torch.arange(24) % 3


class Queued(nn.Module):
    """Keeps the features of the last examples, a column each, as MoCo does."""

    def __init__(self, size=48, axis=1, empty=False):
        super().__init__()
        self.layer, self.axis = nn.Linear(5, 3), axis
        queue = torch.zeros(size, 5) if empty else F.normalize(torch.randn(size, 5), dim=1)
        self.register_buffer("queue", queue.T.contiguous() if axis else queue)
        self.register_buffer("place", torch.tensor(0))

    def enqueue(self, x):
        rows = self.queue.T if self.axis else self.queue
        place = int(self.place)
        rows[place : place + len(x)] = F.normalize(x, dim=1)
        self.place.fill_((place + len(x)) % len(rows))

    def forward(self, x):
        outputs = self.layer(x + self.queue.mean())
        if self.training:
            self.enqueue(x)
        return outputs


class Filled(Queued):
    """Is written by the script."""

    def forward(self, x):
        return self.layer(x + self.queue.mean())


def wrapped(make, devices=1, shards=4):
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=shards, threads=1)


@pytest.mark.parametrize(("axis", "devices", "shards"), [(0, 1, 4), (1, 1, 4), (0, 2, 2)])
def test_a_queue_is_refused(axis, devices, shards):
    with wrapped(lambda: Queued(axis=axis), devices, shards) as trainer:
        assert len(trainer.devices) == devices
        before = trainer.digest()
        with pytest.raises(ModelError) as caught:
            trainer.step((X, Y))
        assert str(caught.value) == (
            "The model's forward pass replaces some slices of the buffer 'queue' of shape "
            f"{(5, 48) if axis else (48, 5)} along axis {axis} and leaves other slices unchanged, as in a queue or a "
            "memory bank. Lockstep averages float buffers over the shards, which would mix old and new slices. Update "
            "the buffer in the script between two steps, from where it is copied to every replica; or use shards=1, "
            "with which nothing is averaged."
        )
        assert trainer.digest() == before


def test_a_queue_that_begins_empty_is_refused_at_the_second_step():
    trainer = wrapped(lambda: Queued(empty=True))
    trainer.step((X, Y))
    with pytest.raises(ModelError, match="as in a queue or a memory"):
        trainer.step((X, Y))


def test_with_one_shard_a_queue_equals_that_of_the_plain_loop():
    trainer = wrapped(Queued, shards=1)
    plain = Queued()
    plain.load_state_dict(trainer.model.state_dict())
    for _ in range(3):
        trainer.step((X, Y))
        plain.enqueue(X)
    assert torch.equal(trainer.model.queue, plain.queue)


def test_a_queue_that_the_script_fills_gives_one_digest_on_1_and_2_devices():
    found = set()
    for devices in (1, 2):
        with wrapped(Filled, devices) as trainer:
            assert len(trainer.devices) == devices
            for _ in range(3):
                trainer.step((X, Y))
                trainer.model.enqueue(X)
            found.add(trainer.digest())
    assert len(found) == 1


class Running(nn.Module):
    """Statistics of every kind that is averaged."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8))
        self.norm, self.cumulative = nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None)
        self.alone, self.last = nn.BatchNorm1d(1), nn.Linear(8, 3)
        self.register_buffer("codes", torch.zeros(6, 8))  # those that no example is near stay 0
        self.register_buffer("teacher", torch.randn(8, 3))
        self.register_buffer("steps", torch.zeros(1, 1))

    def forward(self, x):
        x = self.norm(self.first(x) * torch.tensor([1.0, 0.0] * 4))  # every second channel is dead
        x = self.cumulative(x) + self.alone(x[:, :1])
        with torch.no_grad():
            near = F.one_hot(x[:, 0].gt(0).long(), 6).to(x.dtype)
            self.codes.mul_(0.9).add_(0.1 * near.T @ x)
            self.teacher[:4].lerp_(self.last.weight.T[:4], 0.01)  # the other rows are frozen
            self.steps += 1
        return self.last(x)


def test_running_statistics_are_averaged():
    trainer = wrapped(Running)
    for _ in range(4):
        trainer.step((X, Y))
