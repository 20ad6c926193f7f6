"""The steps of examples/gradients.py are those of a loop by hand, and the same on several devices."""

from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.datasets import digits

TEXT = (Path(__file__).parents[2] / "examples" / "gradients.py").read_text(encoding="utf-8")
STEPS = {}
exec(TEXT[: TEXT.index("(x, y), _ = digits()")], STEPS)

(X, Y), _ = digits()
X, Y = torch.from_numpy(X[:256]), torch.from_numpy(Y[:256])


def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def batches():
    return [((X[at : at + 64], Y[at : at + 64]), (X[at + 64 : at + 128], Y[at + 64 : at + 128])) for at in (0, 128)]


def take(name, trainer, batch, other):
    STEPS[name](trainer, batch, other) if name == "step_without_conflict" else STEPS[name](trainer, batch)


def train(name, devices, shards):
    net, optimizer = build()
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=["cpu"] * devices, shards=shards) as trainer:
        for batch, other in batches():
            take(name, trainer, batch, other)
        return trainer.digest(), {key: value.clone() for key, value in net.state_dict().items()}


class PlainTrainer:
    """What the two methods are in a loop by hand, on one device; `apply` writes the statistics of the pass."""

    def __init__(self):
        self.model, self.optimizer = build()

    def gradients(self, batch):
        buffers = {key: value.clone() for key, value in self.model.named_buffers()}
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(batch[0]), batch[1]).backward()
        found = Plain({name: parameter.grad for name, parameter in self.model.named_parameters()})
        found.buffers = {key: value.clone() for key, value in self.model.named_buffers()}
        self.write(buffers)
        return found

    def apply(self, gradients):
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()
        self.write(gradients.buffers)

    def write(self, buffers):
        for key, value in self.model.named_buffers():
            value.copy_(buffers[key])


class Plain(dict):
    logs = None


@pytest.mark.parametrize("name", ["step_sharpness_aware", "step_without_conflict", "step_clipped"])
def test_the_steps_of_the_example(name):
    plain = PlainTrainer()
    for batch, other in batches():
        take(name, plain, batch, other)
    _, one = train(name, devices=1, shards=1)
    assert {key: value.numpy().tobytes() for key, value in plain.model.state_dict().items()} == {
        key: value.numpy().tobytes() for key, value in one.items()
    }
    assert train(name, devices=3, shards=4)[0] == train(name, devices=1, shards=4)[0]
