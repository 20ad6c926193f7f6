"""Optimizers that are not torch's: they may draw random numbers, and keep what they count in parameter groups."""

import time

import pytest
import torch
from torch import nn

import lockstep

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(64, 6, generator=GENERATOR), torch.randint(0, 3, (64,), generator=GENERATOR)


class Noisy(torch.optim.SGD):
    """Adds noise after each update, as stochastic gradient Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


class Counting(torch.optim.SGD):
    """Has the number of its updates in the group, where its step reads it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.1 / group["count"])


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.001)
        return super().forward(x)


def wrap(optimizer_class, devices, net_class=nn.Linear):
    torch.manual_seed(0)
    net = net_class(6, 3)
    return lockstep.wrap(
        net, optimizer_class(net.parameters(), 0.1), nn.CrossEntropyLoss(), devices=devices, shards=4, threads=1
    )


def test_an_optimizer_that_draws_numbers_draws_the_same_on_every_replica():
    digests = []
    for devices in (1, 2):
        with wrap(Noisy, devices) as trainer:
            assert len(trainer.devices) == devices
            before = torch.get_rng_state()
            for _ in range(3):
                trainer.step((X, Y), verbose=0)
            assert torch.equal(torch.get_rng_state(), before)  # the script's own generator
            digests.append(trainer.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_of_the_optimizer_that_draws_numbers_is_repeatable(register):
    def add_noise(optimizer, *arguments):
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(torch.randn(6), alpha=0.1)

    digests = []
    for number_before in range(2):
        with wrap(torch.optim.SGD, 1) as trainer:
            getattr(trainer.optimizer, register)(add_noise)
            torch.rand(number_before)
            trainer.step((X, Y), verbose=0)
            digests.append(trainer.digest())
    assert digests[0] == digests[1]


def test_the_noise_of_two_steps_differs():
    with wrap(Noisy, 1) as trainer:
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        weights = [trainer.model.weight.detach().clone()]
        for _ in range(2):
            trainer.step((X, Y), verbose=0)
            weights.append(trainer.model.weight.detach().clone())
    assert not torch.equal(weights[1] - weights[0], weights[2] - weights[1])


@pytest.mark.timeout(120)
def test_a_worker_that_joins_inside_an_epoch_has_what_the_optimizer_has_counted(capsys):
    digests = []
    for devices in (1, 2):
        with wrap(Counting, 1, Slow) as trainer:
            if devices == 2:
                trainer.resize(2)
            trainer.fit((X.repeat(64, 1), Y.repeat(64)), batch_size=16, verbose=0)
            assert len(trainer.session.processes.replicas()) == devices
            digests.append(trainer.digest())
    assert "takes part from step" in capsys.readouterr().err
    assert digests[0] == digests[1]
