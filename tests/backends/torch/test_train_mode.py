"""Modes: `step` trains in those that the script has set, as a plain loop; `fit` in training mode."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)) + 3
Y = torch.arange(24) % 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def wrapped(net, devices=1, shards=4, loss=None):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss = loss or nn.CrossEntropyLoss()
    return lockstep.wrap(net, optimizer, loss, devices=devices, shards=shards, threads=1)


def modes(net):
    return [module.training for module in net.modules()]


def plain_steps(net, count):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()
    torch.set_num_threads(threads)


def test_steps_in_evaluation_mode_are_those_of_the_plain_loop():
    net, plain = network(), network()
    trainer = wrapped(net, shards=1)
    net.eval()
    plain.eval()
    for _ in range(3):
        trainer.step((X, Y))
    plain_steps(plain, 3)
    assert modes(net) == [False] * 5
    assert net[1].num_batches_tracked == 0
    for name, tensor in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], tensor), name


def test_a_dropout_alone_in_evaluation_mode_is_off():
    net, plain = network(), network()
    trainer = wrapped(net, shards=1)
    net[2].eval()
    plain[2].eval()
    trainer.step((X, Y))
    plain_steps(plain, 1)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], tensor), name


def test_modes_changed_between_steps_give_one_digest_on_1_and_2_devices():
    found = set()
    for devices in (1, 2):
        net = network()
        with wrapped(net, devices) as trainer:
            assert len(trainer.devices) == devices
            trainer.step((X, Y))
            net.eval()
            trainer.step((X, Y))
            assert net[1].num_batches_tracked == 1
            trainer.evaluate((X, Y))
            net[2].train()  # dropout alone
            trainer.step((X, Y))
            net.train()
            net[1].eval()
            trainer.step((X, Y))
            assert net[1].num_batches_tracked == 1
            net.train()
            trainer.step((X, Y))
            assert net[1].num_batches_tracked == 2
            found.add(trainer.digest())
    assert len(found) == 1


def test_an_objective_has_the_modes_of_the_script():
    seen = []

    @lockstep.objective
    def loss(net, batch):
        seen.append(net.training)
        return F.cross_entropy(net(batch[0]), batch[1])

    net = network().eval()
    wrapped(net, shards=1, loss=loss).step((X, Y))
    assert seen == [False]


class Recording(lockstep.Callback):
    def __init__(self):
        self.modes = []

    def on_train_batch_end(self, batch, logs=None):
        self.modes.append(modes(self.trainer.model))
        self.trainer.model.eval()  # and forgets to put it back


@pytest.mark.parametrize("devices", [1, 2])
def test_a_fit_trains_in_training_mode_whatever_a_callback_leaves(devices):
    net, other = network().eval(), network()
    recording = Recording()
    with wrapped(net, devices) as trainer, wrapped(other) as usual:
        assert len(trainer.devices) == devices
        for each, callbacks in ((trainer, [recording]), (usual, [])):
            each.fit((X, Y), epochs=2, batch_size=12, verbose=0, validation_data=(X, Y), callbacks=callbacks)
        assert recording.modes == [[True] * 5] * 4
        assert trainer.digest() == usual.digest()


def test_a_fit_keeps_submodules_in_evaluation_mode_below_a_root_in_training_mode():
    net = network()
    trainer = wrapped(net)
    net[1].eval()
    trainer.fit((X, Y), epochs=2, batch_size=12, verbose=0, validation_data=(X, Y))
    assert modes(net) == [True, True, False, True, True]
    assert net[1].num_batches_tracked == 0


class Freezing(nn.Sequential):
    """Keeps its batch norm frozen, as many do."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


class Frozen(nn.Module):
    """Freezes its batch norm wherever it is put into training mode, as detection models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(5, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x))))

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize("devices", [1, 2])
def test_a_fit_calls_a_train_of_the_models_own_also_of_a_fresh_model(devices):
    net = Frozen()
    assert net.norm.training  # new, and not yet put into any mode
    net.drop.eval()
    with wrapped(net, devices=devices) as trainer:
        trainer.fit(X, Y, batch_size=24, epochs=2, verbose=0)
    assert int(net.norm.num_batches_tracked) == 0
    assert [net.training, net.norm.training, net.drop.training] == [True, False, False]


def test_a_fit_calls_the_models_own_train():
    net = Freezing(*network()).eval()
    wrapped(net).fit((X, Y), epochs=1, batch_size=12, verbose=0)
    assert modes(net) == [True, True, False, True, True]
    assert net[1].num_batches_tracked == 0


@pytest.mark.parametrize("devices", [1, 2])
def test_evaluation_mode_is_resumed(tmp_path, devices):
    one = wrapped(network().eval())
    one.step((X, Y))
    one.save(tmp_path / "saved")
    one.step((X, Y))
    with wrapped(network(), devices) as two:
        assert len(two.devices) == devices
        two.restore(tmp_path / "saved")
        assert modes(two.model) == [False] * 5
        two.step((X, Y))
        assert two.digest() == one.digest()


def test_a_frozen_batch_norm_is_taken_up_by_a_model_in_evaluation_mode(tmp_path):
    one = wrapped(network())
    one.model[1].eval()
    one.save(tmp_path / "saved")
    two = wrapped(network().eval())
    two.restore(tmp_path / "saved")
    assert modes(two.model) == [True, True, False, True, True]


def test_verify_makes_its_steps_in_the_scripts_modes():
    net = network()
    net[1].eval()
    trainer = wrapped(net)
    trainer.step((X, Y))
    before = copy.deepcopy(net.state_dict())
    trainer.verify((X, Y), steps=1, devices=(1, 2), batch_size=24)
    assert modes(net) == [True, True, False, True, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
