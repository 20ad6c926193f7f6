"""float16 with a dynamic loss scale."""

import pytest
import torch
from torch import nn

import lockstep

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def wrapped(factor):
    """A trainer whose loss, and so its scaled gradient in float16, is `factor` times as large."""
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return lockstep.wrap(
        net,
        optimizer,
        lambda outputs, targets: ((outputs - targets) ** 2).mean() * factor,
        devices=1,
        shards=2,
        threads=1,
        precision="fp16",
    )


def scale(trainer):
    return trainer._backend.state()["scaler.scale"].data.item()


def test_an_overflow_skips_the_step_and_halves_the_scale():
    with wrapped(1e4) as trainer:
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        assert scale(trainer) == 2.0**16
        trainer.step((X, Y))
        assert scale(trainer) == 2.0**15
        assert all(torch.equal(trainer.model.state_dict()[name], value) for name, value in before.items())
        steps = 0
        while torch.equal(trainer.model.weight, before["weight"]):
            trainer.step((X, Y))
            steps += 1
            assert steps < 16


def test_without_an_overflow_the_scale_changes_no_bits():
    with wrapped(1.0) as trainer:
        logs = trainer.step((X, Y))
        norm = logs["grad_norm"]
        assert scale(trainer) == 2.0**16
        found = trainer.model.weight.detach().clone()
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    for start in (0, 8):
        with torch.autocast("cpu", torch.float16):
            value = ((net(X[start : start + 8]) - Y[start : start + 8]) ** 2).mean() * 0.5
        (value * 2.0**16).backward()
    for parameter in net.parameters():
        parameter.grad /= 2.0**16
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert torch.equal(net.weight, found)
    assert norm == pytest.approx(nn.utils.get_total_norm([each.grad for each in net.parameters()]).item(), rel=1e-6)


def test_the_scale_is_part_of_the_state():
    with wrapped(1e4) as trainer:
        state, before = trainer._backend.state(), trainer.digest()
        trainer.step((X, Y))
        assert scale(trainer) == 2.0**15
        trainer._backend.load(state)
        trainer._run.step = 0
        assert scale(trainer) == 2.0**16
        assert trainer.digest() == before
