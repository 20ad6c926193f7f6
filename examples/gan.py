"""Two optimizers: a generator that learns to draw digits, and a critic that learns to tell them from real ones.

Both networks are in one ModuleDict, which two trainers train: each has the optimizer and the loss of its own half. So
every replica has both halves, and what one trainer has updated the other one sees in its next step.
"""

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.datasets import digits

NOISE, BATCH_SIZE = 16, 128

(images, _), _ = digits()
images = torch.from_numpy(images)
torch.manual_seed(0)
nets = nn.ModuleDict(
    {
        "generator": nn.Sequential(
            nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid()
        ),
        "critic": nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)),
    }
)


@lockstep.objective
def criticize(nets, batch):
    """The critic's loss: real images are 1, drawn ones 0."""
    drawn = nets["generator"](batch["noise"]).detach()
    real, fake = nets["critic"](batch["images"]), nets["critic"](drawn)
    return F.softplus(-real).mean() + F.softplus(fake).mean()


@lockstep.objective
def draw(nets, batch):
    """The generator's loss: the critic takes what it has drawn for real."""
    return F.softplus(-nets["critic"](nets["generator"](batch["noise"]))).mean()


devices = ["cpu", "cpu"]
critic = lockstep.wrap(nets, torch.optim.Adam(nets["critic"].parameters(), 2e-3), criticize, devices=devices, shards=4)
generator = lockstep.wrap(nets, torch.optim.Adam(nets["generator"].parameters(), 2e-3), draw, devices=devices, shards=4)
for epoch in range(4):
    for start in range(0, len(images) - BATCH_SIZE, BATCH_SIZE):
        batch = {"images": images[start : start + BATCH_SIZE], "noise": torch.randn(BATCH_SIZE, NOISE)}
        told = critic.step(batch, verbose=0)
        drawn = generator.step({"noise": batch["noise"]}, verbose=0)
    print(f"epoch {epoch + 1}: the critic's loss {told['loss']:.4f}, the generator's {drawn['loss']:.4f}")
print(generator.digest())
