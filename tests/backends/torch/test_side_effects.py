"""Global state, modes and gradients of the script are afterwards as they were."""

import copy
import random
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import BatchError, NonFiniteError

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.fixture
def trainer(net):
    optimizer = torch.optim.Adam(net.parameters())
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=4, threads=1) as trainer:
        yield trainer


def failing_step(trainer):
    with pytest.raises(NonFiniteError):
        trainer.step((X * torch.nan, Y))


USES = {
    "step": lambda trainer: trainer.step((X, Y)),
    "fit": lambda trainer: trainer.fit((X, Y), batch_size=12, verbose=0),
    "fit a loader": lambda trainer: trainer.fit(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=12, shuffle=True), verbose=0
    ),
    "evaluate": lambda trainer: trainer.evaluate((X, Y)),
    "predict": lambda trainer: trainer.predict(X),
    "call": lambda trainer: trainer(X),
    "digest": lambda trainer: trainer.digest(),
    "failing step": failing_step,
}


def generators():
    return random.getstate(), str(np.random.get_state()), torch.random.get_rng_state().tolist()


def switches():
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.fixture
def unusual():
    """Every switch away from where Lockstep computes."""
    threads, filled = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark = True
    yield switches()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize("use", USES)
def test_random_number_generators_are_restored(trainer, use):
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = generators()
    USES[use](trainer)
    assert generators() == before


@pytest.mark.parametrize("use", USES)
def test_switches_are_restored(trainer, unusual, use):
    USES[use](trainer)
    assert switches() == unusual


def test_everything_is_restored_if_an_addition_fails(trainer, unusual, monkeypatch):
    before = generators()
    monkeypatch.setattr(trainer.session.backend, "add", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:  # and while its traceback is kept, as a notebook does
        trainer.step((X, Y))
    assert caught.value.__traceback__ is not None
    assert switches() == unusual
    assert generators() == before


def test_switches_of_the_script_do_not_change_the_bits(net, unusual):
    found = set()
    for threads, benchmark in ((2, True), (1, False)):
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        own = copy.deepcopy(net)
        optimizer = torch.optim.Adam(own.parameters())
        with (
            torch.no_grad(),
            lockstep.wrap(own, optimizer, nn.CrossEntropyLoss(), devices=1, shards=2, threads=1) as trainer,
        ):
            trainer.step((X, Y))
            found.add(trainer.digest())
    assert len(found) == 1


def test_gradients_of_the_script_are_ignored_and_removed(net, trainer):
    other = copy.deepcopy(net)
    trainer.step((X, Y))
    optimizer = torch.optim.Adam(other.parameters())
    with lockstep.wrap(other, optimizer, nn.CrossEntropyLoss(), devices=1, shards=4, threads=1) as second:
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        second.step((X, Y))
        assert second.digest() == trainer.digest()
    assert all(parameter.grad is None for parameter in [*net.parameters(), *other.parameters()])


def test_the_model_is_usable_between_steps(net, trainer):
    keys, parameters = list(net.state_dict()), list(net.parameters())
    for _ in range(2):
        trainer.step((X, Y))
        assert list(net.state_dict()) == keys
        assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
        assert net(X).requires_grad
        copied = copy.deepcopy(net).eval()
        torch.testing.assert_close(copied(X), trainer(X))
        assert net.training
    assert trainer.model is net


@pytest.mark.parametrize("use", ["evaluate", "predict", "call"])
def test_every_module_keeps_its_mode(net, trainer, use):
    net[1].eval()
    USES[use](trainer)
    assert [module.training for module in net] == [True, False, True, True, True]
    net.eval()
    USES[use](trainer)
    assert not any(module.training for module in net.modules())


def test_a_call_gives_tensors_and_predict_numpy(trainer):
    assert isinstance(trainer(X), torch.Tensor)
    assert not trainer(X).requires_grad
    assert isinstance(trainer.predict(X), np.ndarray)


def test_in_place_changes_of_the_script_are_used(net, trainer):
    before = trainer.digest()
    with torch.no_grad():
        net[0].weight[0, 0] += 1
    assert trainer.digest() != before


def test_a_layer_frozen_between_steps_is_skipped(net, trainer):
    trainer.step((X, Y))
    net[0].requires_grad_(False)
    frozen, free = net[0].weight.detach().clone(), net[4].weight.detach().clone()
    trainer.step((X, Y))
    assert torch.equal(net[0].weight, frozen)
    assert not torch.equal(net[4].weight, free)


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: torch.Tensor


class Shaped(nn.Linear):
    """Gives its outputs in a form of the test's choice."""

    def __init__(self, form):
        super().__init__(5, 3)
        self.form = form

    def forward(self, x):
        return self.form(super().forward(x))


def shaped(form):
    torch.manual_seed(0)
    net = Shaped(form)
    return lockstep.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), devices=1, shards=4)


@pytest.mark.parametrize(
    "form",
    [
        lambda out: [out, out * 2],
        lambda out: (out, {"twice": out * 2}),
        lambda out: {"a": [out], "b": (out * 2, out)},
        lambda out: Pair(out, out * 2),
    ],
    ids=["list", "tuple and dict", "deep", "named tuple"],
)
def test_outputs_keep_their_form(form):
    with shaped(form) as trainer:
        expected = form(nn.functional.linear(X, trainer.model.weight, trainer.model.bias))
        for found in (trainer.predict(X, batch_size=10), trainer(X)):
            assert type(found) is type(expected)
            torch.testing.assert_close(
                torch.utils._pytree.tree_map(torch.as_tensor, found), expected, check_stride=False
            )


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (Output, "returned Output"),
        (lambda out: out.mean(), "returned ndarray()"),
        (lambda out: [out, out.mean()], "returned ndarray()"),
        (lambda out: out[:1], "returned ndarray(1, 3)"),
        (lambda out: out.tolist(), "returned float"),
    ],
    ids=["dataclass", "scalar", "scalar in a list", "too few", "numbers"],
)
def test_outputs_without_a_row_for_each_example_are_refused(form, said):
    with shaped(form) as trainer:
        for use in (trainer.predict, trainer):
            with pytest.raises(BatchError) as caught:
                use(X)
            assert str(caught.value).startswith("The model returned ")
            assert said in str(caught.value)


def digest_of(net, num_devices, start=lambda: None):
    """Returns the digest of a net with dropout after eight epochs, evaluated inside of its fit."""

    class Evaluating(lockstep.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.trainer.evaluate((X, Y))

    with lockstep.wrap(
        net, torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), devices=num_devices, shards=4, threads=1
    ) as trainer:
        start()
        trainer.fit((X, Y), epochs=8, batch_size=12, callbacks=[Evaluating()], validation_data=(X, Y), verbose=0)
        return trainer.digest()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_trainers_in_two_threads_do_not_disturb_each_other(net, num_devices):
    nets = [net, copy.deepcopy(net)]
    with torch.no_grad():
        nets[1][0].weight.add_(1)
    alone = [digest_of(copy.deepcopy(each), 1) for each in nets]
    before, meeting = generators(), threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda each: digest_of(each, num_devices, meeting.wait), nets))
    assert together == alone
    assert generators() == before
    assert not torch.are_deterministic_algorithms_enabled()
