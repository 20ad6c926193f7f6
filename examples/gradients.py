"""Gradients that a script reads and replaces: sharpness-aware minimization, gradient surgery, clipping by value.

`trainer.gradients(batch)` gives the gradient of the whole batch by parameter name, and `trainer.apply(gradients)` makes
the optimizer's step with it on every replica. Between the two the script may read and replace what it likes.
"""

import torch
from torch import nn

import lockstep
from lockstep.datasets import digits


def step_sharpness_aware(trainer, batch, radius=0.05):
    """SAM: the gradient at the worst point near the weights."""
    gradients = trainer.gradients(batch)
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients.values()]))
    weights = dict(trainer.model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    with torch.no_grad():
        for name, gradient in gradients.items():
            weights[name].add_(gradient, alpha=radius / float(norm))
    second = trainer.gradients(batch)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(before[name])
    trainer.apply(second)
    return gradients.logs


def step_without_conflict(trainer, batch, other):
    """Gradient surgery (PCGrad): takes from one task's gradient what works against the other task."""
    gradients, against = trainer.gradients(batch), trainer.gradients(other)
    for name, gradient in gradients.items():
        inner = (gradient * against[name]).sum()
        if inner < 0:
            gradient = gradient - inner / against[name].square().sum() * against[name]
        gradients[name] = gradient + against[name]
    trainer.apply(gradients)
    return gradients.logs


def step_clipped(trainer, batch, limit=0.1):
    """Clipping by value."""
    gradients = trainer.gradients(batch)
    for name, gradient in gradients.items():
        gradients[name] = gradient.clamp(-limit, limit)
    trainer.apply(gradients)
    return gradients.logs


(x, y), _ = digits()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
trainer = lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=["cpu", "cpu"], shards=4)
for start in range(0, 512, 128):
    batch, other = ((x[at : at + 128], y[at : at + 128]) for at in (start, start + 512))
    sharp = step_sharpness_aware(trainer, batch)
    both = step_without_conflict(trainer, batch, other)
    clipped = step_clipped(trainer, batch)
    print("losses", *(f"{logs['loss']:.4f}" for logs in (sharp, both, clipped)))
print(trainer.digest())
