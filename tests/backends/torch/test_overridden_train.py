"""Modules with a `train()` of their own: evaluation calls it twice, and changes no bit of the weights."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.backends.torch.train_mode import evaluation_mode

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


class Adapted(nn.Linear):
    """A LoRA layer as loralib writes it: merged in evaluation mode, apart in training mode."""

    def __init__(self):
        super().__init__(8, 3)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(2, 8)), nn.Parameter(torch.zeros(3, 2))
        self.weight.requires_grad = False
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode and self.merged:
            self.merge(-1.0)
        if not mode and not self.merged:
            self.merge(1.0)
        return self

    def merge(self, sign):
        self.weight.data += sign * self.b @ self.a
        self.merged = not self.merged

    def forward(self, x):
        outputs = nn.functional.linear(x, self.weight, self.bias)
        return outputs if self.merged else outputs + x @ self.a.T @ self.b.T


class Replacing(Adapted):
    """Puts new memory into the weight, as other libraries do."""

    def merge(self, sign):
        self.weight.data = self.weight.data + sign * self.b @ self.a
        self.merged = not self.merged


class Counting(Adapted):
    """Writes so that torch counts it."""

    def merge(self, sign):
        with torch.no_grad():
            self.weight += sign * self.b @ self.a
        self.merged = not self.merged


def wrapped(make, devices=1, loss=None, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout(0.1), make())
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.5)
    loss = loss or nn.CrossEntropyLoss()
    return lockstep.wrap(net, optimizer, loss, devices=devices, shards=2, threads=1, **options)


@pytest.mark.parametrize("make", [Adapted, Replacing, Counting])
def test_evaluation_between_steps_changes_no_bit(make):
    def run(look, devices=1):
        with wrapped(make, devices) as trainer:
            assert len(trainer.devices) == devices
            found = []
            for _ in range(4):
                found.append(trainer.step((X, Y))["loss"])
                before = trainer.digest()
                look(trainer)
                assert trainer.digest() == before
                assert not trainer.model[1].merged
                assert trainer.model[1].training
            return found, trainer.digest()

    plain = run(lambda trainer: None)
    assert run(lambda trainer: trainer.evaluate((X, Y))) == plain
    assert run(lambda trainer: trainer.predict(X)) == plain
    assert run(lambda trainer: (trainer.evaluate((X, Y)), trainer.predict(X)), devices=2) == plain


def test_evaluation_computes_with_the_merged_weight():
    class Telling(Adapted):
        def forward(self, x):
            assert self.merged is not self.training
            return super().forward(x)

    trainer = wrapped(Telling)
    trainer.step((X, Y))
    trainer.evaluate((X, Y))
    trainer.step((X, Y))


def test_a_layer_that_the_script_has_put_into_evaluation_mode_stays_merged():
    trainer = wrapped(Adapted)
    for _ in range(3):
        trainer.step((X, Y))
    layer = trainer.model[1].eval()
    before = layer.weight.clone()
    trainer.evaluate((X, Y))
    assert (layer.merged, layer.training, trainer.model.training) == (True, False, True)
    assert torch.equal(layer.weight, before)


def test_probing_how_a_loss_reduces_changes_nothing():
    def entropy(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    trainer = wrapped(Adapted, loss=entropy)
    for _ in range(3):
        trainer.step((X, Y))
        assert not trainer.model[1].merged


class Holding(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def train(self, mode=True):
        return super().train(mode)


def test_a_layer_in_two_modules_ends_in_its_own_mode():
    layer = Adapted()
    nn.init.ones_(layer.b)
    net = nn.Sequential(Holding(layer), Holding(layer))
    net[1].eval()
    nn.Module.train(layer, True)  # the flag alone
    layer.train()
    with evaluation_mode(net):
        assert layer.merged
    assert [net[0].training, net[1].training, layer.training, layer.merged] == [True, False, True, False]


def test_a_train_that_was_put_on_the_object_is_called():
    calls = []
    net = nn.Sequential(nn.Linear(8, 3))
    net[0].train = lambda mode=True: calls.append(mode)
    with evaluation_mode(net):
        assert calls == [False]
        assert net[0].training
    assert calls == [False, True]


def test_an_error_in_evaluation_leaves_the_modes_and_the_weights():
    net = nn.Sequential(Adapted())
    nn.init.ones_(net[0].b)
    before = net[0].weight.clone()
    with pytest.raises(RuntimeError, match="in between"), evaluation_mode(net):
        raise RuntimeError("in between")
    assert net[0].training
    assert not net[0].merged
    assert torch.equal(net[0].weight, before)


def test_a_fit_keeps_an_adapter_merged_that_the_script_has_put_into_evaluation_mode():
    trainer = wrapped(Adapted)
    layer = trainer.model[1].eval()
    trainer.fit((X, Y), epochs=1, batch_size=24, verbose=0)
    assert (layer.merged, layer.training) == (True, False)
