"""PyTorch's introductory MNIST script, with nothing changed but the lines that wrap the model and make a step."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import lockstep

GENERATOR = torch.Generator().manual_seed(0)
CLASSES = torch.randint(0, 4, (160,), generator=GENERATOR)
PICTURES = torch.randn(160, 1, 12, 12, generator=GENERATOR) + CLASSES[:, None, None, None]
DATA = TensorDataset(PICTURES, CLASSES)


class Net(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(rate)
        self.fc = nn.Linear(100, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def evaluate(model, loader):
    model.eval()
    total = correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            total += F.nll_loss(output, target, reduction="sum").item()
            correct += (
                output.argmax(dim=1, keepdim=True).eq(target.view_as(output.argmax(1, keepdim=True))).sum().item()
            )
    return total / len(loader.dataset), correct / len(loader.dataset)


def main(make_step, rate=0.25):
    """The script; `make_step` returns what replaces zero_grad, forward, backward and step."""
    torch.manual_seed(1)
    train_loader = DataLoader(DATA, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(2))
    test_loader = DataLoader(DATA, batch_size=100)
    model = Net(rate)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    step = make_step(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for _ in range(3):
        model.train()
        losses += [step(data, target) for data, target in train_loader]
        losses += evaluate(model, test_loader)
        scheduler.step()
    return losses, [weight.detach().clone() for weight in model.parameters()]


def by_hand(model, optimizer):
    def step(data, target):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def wrapped(**options):
    def make_step(model, optimizer):
        trainer = lockstep.wrap(model, optimizer, F.nll_loss, **options)
        return lambda data, target: trainer.step((data, target), verbose=0)["loss"]

    return make_step


def test_with_one_shard_the_script_equals_the_plain_loop():
    """The same bits, except that dropout draws other numbers."""
    losses, weights = main(by_hand, rate=0.0)
    found, trained = main(wrapped(devices=1, shards=1, threads=torch.get_num_threads()), rate=0.0)
    assert found == pytest.approx(losses, rel=1e-12)
    assert all(torch.equal(one, other) for one, other in zip(weights, trained, strict=True))


def test_the_script_gives_the_same_bits_on_any_number_of_devices():
    one, two = (main(wrapped(devices=devices, shards=2)) for devices in (1, 2))
    assert one[0] == two[0]
    assert one[0][-2] < one[0][0]  # and it learns
    assert all(torch.equal(left, right) for left, right in zip(one[1], two[1], strict=True))
