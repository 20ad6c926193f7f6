"""Losses that are sums beside torch's plain loop, and batches of three entries as torch's data sets give them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.core.loss_reduction import Reduction
from lockstep.errors import BatchError

X = torch.rand(24, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3


class Autoencoder(nn.Module):
    """The variational autoencoder of pytorch/examples, its noise given with the batch so that both loops see the same.

    Its loss is a sum of binary cross-entropies and of the divergence, divided by nothing.
    """

    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(12, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.fc3, self.fc4 = nn.Linear(2, 8), nn.Linear(8, 12)

    def forward(self, x, noise):
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + noise * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae_loss(outputs, x):
    recon, mu, logvar = outputs
    bce = F.binary_cross_entropy(recon, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


@lockstep.objective
def vae_objective(model, batch):
    x, noise = batch
    return lockstep.Sum(vae_loss(model(x, noise), x))


def gradient(net, before):
    return torch.cat([(old - new).flatten() for old, new in zip(before, net.parameters(), strict=True)]).detach()


@pytest.mark.parametrize("form", ["function", "objective"])
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_the_loss_of_an_autoencoder_equals_the_plain_loops(form, shards):
    torch.manual_seed(0)
    noise = torch.randn(24, 2)
    net = Autoencoder()
    plain = copy.deepcopy(net)
    loss = vae_loss(plain(X, noise), X)
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    batch, given = {"function": (((X, noise), X), vae_loss), "objective": ((X, noise), vae_objective)}[form]
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with lockstep.wrap(net, optim.SGD(net.parameters(), 1.0), given, devices=1, shards=shards, threads=1) as trainer:
        assert trainer.step(batch)["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert "taken as" not in trainer.opening
    torch.testing.assert_close(gradient(net, before), expected, rtol=1e-4, atol=1e-5)


def half_and_half(outputs, targets):
    """A mean over what counts, which is something else in every shard."""
    return (outputs - targets)[targets > 0.5].pow(2).mean()


def fixed(outputs, targets):
    return (outputs - targets).view(24, 12).pow(2).mean()


@pytest.mark.parametrize(
    ("loss", "shards", "reduction"),
    [
        (lambda outputs, targets: (outputs - targets).pow(2).sum() / 24, 4, Reduction.SUM),
        (lambda outputs, targets: (outputs - targets).pow(2).mean(), 4, Reduction.MEAN),
        (lambda outputs, targets: (outputs - targets).pow(2).mean(1), 4, Reduction.MEAN),
        (half_and_half, 4, Reduction.ASSUMED),
        (fixed, 1, Reduction.ASSUMED),  # works with one shard only
        (lambda outputs, targets: 0 * outputs.sum(), 4, None),  # a loss of 0 decides nothing: a later step may
    ],
)
def test_the_reduction_of_a_function_is_determined(loss, shards, reduction):
    net = nn.Linear(12, 12)
    with lockstep.wrap(net, optim.SGD(net.parameters(), 0.1), loss, devices=1, shards=shards, threads=1) as trainer:
        trainer.step((X, X))
        assert trainer.session.run.reduction is reduction
        assert trainer.opening.endswith("taken as the mean over examples") is (reduction is Reduction.ASSUMED)


def test_probing_how_a_loss_reduces_changes_no_bit():
    """Dropout, batch norm and torch's own generator are as without the probe; the mode is the script's."""

    class Own(nn.Module):
        def forward(self, outputs, targets):
            return F.mse_loss(outputs, targets)

    found = []
    for loss in (nn.MSELoss(), F.mse_loss, Own(), lambda outputs, targets: F.mse_loss(outputs, targets)):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 12))
        with lockstep.wrap(net, optim.SGD(net.parameters(), 0.1), loss, devices=1, shards=4, threads=1) as trainer:
            for _ in range(2):
                trainer.step((X, X))
            found.append((trainer.digest(), torch.rand(1).item(), net.training, int(net[1].num_batches_tracked)))
    assert len(set(found)) == 1


def test_a_loss_per_example_with_weights_is_a_mean():
    net = nn.Linear(12, 12)
    each = lambda outputs, targets: (outputs - targets).pow(2).mean(1)  # noqa: E731
    with lockstep.wrap(net, optim.SGD(net.parameters(), 0.1), each, devices=1, shards=4, threads=1) as trainer:
        trainer.step((X, X, torch.rand(24)))
        assert trainer.session.run.reduction is Reduction.MEAN


def test_sum_losses_in_verify_and_with_a_pipeline():
    torch.manual_seed(0)
    net = nn.Linear(12, 12)
    total = lambda outputs, targets: (outputs - targets).pow(2).sum()  # noqa: E731
    with lockstep.wrap(net, optim.SGD(net.parameters(), 1e-3), total, devices=2, shards=4, threads=1) as trainer:
        data = lockstep.data.arrays(X.numpy(), X.numpy()).shuffle(0).batch(12).prefetch(1)
        history = trainer.fit(data, epochs=2, verbose=0).history
        assert trainer.session.run.reduction is Reduction.SUM
        assert history["loss"][0] > 50  # the sum of both batches
        assert trainer.verify((X, X), steps=2, devices=(1, 2)).equal


@pytest.mark.parametrize("third", [torch.arange(24), torch.arange(24).int(), list(range(24))])
def test_an_index_as_the_third_entry_is_refused(third):
    """(image, label, index) from a loader, as many data sets give it."""
    net = nn.Linear(12, 3)
    data = TensorDataset(X, LABELS, torch.as_tensor(third))
    with lockstep.wrap(net, optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), devices=1, shards=4) as trainer:
        with pytest.raises(BatchError) as caught:
            trainer.fit(DataLoader(data, batch_size=24), verbose=0)
        assert "give ((inputs, index), targets)" in str(caught.value)
        assert "give weights.float()" in str(caught.value)
        with pytest.raises(BatchError, match="third entry of int"):
            trainer.step((X, LABELS, third))
        trainer.step((X, LABELS, torch.as_tensor(third).float()))  # the ways out work
        trainer.step((X, LABELS, torch.as_tensor(third) % 2 == 0))


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.bias = nn.Linear(12, 3), nn.Embedding(24, 3)

    def forward(self, x, index):
        return self.head(x) + self.bias(index)


def test_the_way_out_for_an_index_and_for_two_inputs():
    net = Indexed()
    index = torch.arange(24)
    with lockstep.wrap(net, optim.SGD(net.parameters(), 0.1), nn.MSELoss(), devices=1, shards=4) as trainer:
        with pytest.raises(BatchError) as caught:
            trainer.step((X, index, X[:, :3]))
        assert "missing 1 required positional argument: 'index'" in str(caught.value)
        assert "three entries are (inputs, targets, weights)" in str(caught.value)
        assert "give ((a, b), targets)" in str(caught.value)
        trainer.step(((X, index), X[:, :3]))
        assert np.isfinite(trainer.evaluate(((X, index), X[:, :3]))["loss"])
