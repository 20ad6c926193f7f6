"""Parametrized modules have a class that torch creates at run time; they are pickled as the class below it."""

import pickle

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import lockstep
from lockstep.backends.base import Options, Recipe
from lockstep.backends.torch import pickling

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


class Scale(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Stateful(nn.Linear):
    """A parametrized class with a state of its own, in which what is not pickled is missing."""

    def __getstate__(self):
        return {**super().__getstate__(), "note": "sent"}


def create():
    torch.manual_seed(0)
    both = parametrizations.spectral_norm(nn.Linear(5, 8))
    parametrize.register_parametrization(both, "bias", Scale())
    held = parametrizations.orthogonal(Stateful(8, 8))
    return nn.Sequential(both, nn.Tanh(), held, parametrizations.weight_norm(nn.Linear(8, 3), dim=1))


def test_a_pickled_model_is_the_same():
    net = create()
    recipe = Recipe(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), [], Options())
    other = pickle.loads(pickling.dump(recipe)).model
    assert [name for name, _ in other.named_modules()] == [name for name, _ in net.named_modules()]
    assert list(other.state_dict()) == list(net.state_dict())
    assert torch.equal(other(X), net(X))
    assert parametrize.type_before_parametrizations(other[2]) is Stateful
    assert other[2].note == "sent"
    assert type(other[0]) is not type(net[0])
    parametrize.remove_parametrizations(other[0], "bias")
    assert torch.equal(other[0].bias, net[0].bias)


def test_two_replicas_give_the_bits_of_one():
    digests = set()
    for devices in (["cpu"], ["cpu"] * 2):
        net = create()
        optimizer = torch.optim.Adam(net.parameters())
        with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=2, threads=1) as trainer:
            for _ in range(3):
                trainer.step((X, Y), verbose=0)
            digests.add(trainer.digest())
    assert len(digests) == 1
