"""What a loss takes from around it: seen where it changes, for workers have it as it was when they were started."""

import functools
import re
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.backends.torch.closure_guard import Surroundings
from lockstep.errors import ExactError

torch.manual_seed(6)
BATCH = torch.randn(16, 13), torch.randint(5, (16,))
BETA = 1.0
SETTINGS = types.SimpleNamespace(beta=1.0, unused=1.0)
TABLE = {"beta": 1.0}
NUMBERS = np.ones(5, np.float32)
WEIGHTS = torch.ones(5)


def helper():
    return BETA


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 5))


def of_a_global(outputs, targets):
    return F.cross_entropy(outputs, targets) * BETA


def of_a_helper(outputs, targets):
    return F.cross_entropy(outputs, targets) * helper()


def of_an_object(outputs, targets):
    return F.cross_entropy(outputs, targets) * SETTINGS.beta


def of_a_table(outputs, targets):
    return F.cross_entropy(outputs, targets) * TABLE["beta"]


def of_an_array(outputs, targets):
    return F.cross_entropy(outputs, targets, torch.from_numpy(NUMBERS))


def of_a_tensor(outputs, targets):
    return (F.cross_entropy(outputs, targets, reduction="none") * WEIGHTS[targets]).mean()


def of_a_default(outputs, targets, factors=[1.0]):  # noqa: B006
    return F.cross_entropy(outputs, targets) * factors[0]


class Focal:
    """A loss object with a number and a network of its own."""

    def __init__(self):
        self.g = 1.0
        self.teacher = nn.Linear(5, 5)

    def __call__(self, outputs, targets):
        return F.cross_entropy(self.teacher(outputs), targets) * self.g

    def method(self, outputs, targets):
        return F.cross_entropy(outputs, targets) * self.g


class Criterion(nn.Module):
    """A module whose code names a global."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs, targets) * BETA


def set_beta():
    globals()["BETA"] = BETA + 0.5


def set_settings():
    SETTINGS.beta += 0.5


def set_table():
    TABLE["beta"] += 0.5


def set_numbers():
    NUMBERS[2] += 1.0


def set_weights():
    WEIGHTS[2] += 1.0


def set_default():
    of_a_default.__defaults__[0][0] += 0.5


FOCAL = Focal()


def set_focal():
    FOCAL.g += 0.5


def train_teacher():
    with torch.no_grad():
        FOCAL.teacher.weight.mul_(0.5)


def rest_teacher():
    FOCAL.teacher.training ^= True


CASES = [
    (of_a_global, set_beta, "BETA"),
    (of_a_helper, set_beta, "BETA"),
    (lockstep.objective(lambda model, batch: of_a_global(model(batch[0]), batch[1])), set_beta, "BETA"),
    (Criterion(), set_beta, "BETA"),
    (of_an_object, set_settings, "SETTINGS.beta"),
    (of_a_table, set_table, "TABLE"),
    (of_an_array, set_numbers, "NUMBERS"),
    (of_a_tensor, set_weights, "WEIGHTS"),
    (of_a_default, set_default, "factors"),
    (functools.partial(of_a_global, factor=WEIGHTS), set_weights, "factor"),
    (FOCAL, set_focal, "Focal.g"),
    (FOCAL, train_teacher, "Focal.teacher"),
    (FOCAL, rest_teacher, "Focal.teacher"),
    (FOCAL.method, set_focal, "self.g"),
]


@pytest.mark.parametrize("loss, change, name", CASES)
def test_a_change_is_seen(loss, change, name):
    surroundings = Surroundings(loss, net())
    change()
    surroundings.check()  # nobody has got it yet
    surroundings.note()
    surroundings.check()
    change()
    with pytest.raises(ExactError, match=rf"as it was when they were started\. {re.escape(repr(name))} was changed"):
        surroundings.check()
    surroundings.look()  # the loss itself did it
    surroundings.check()


def test_what_is_no_change():
    """The model's own, what the loss does not name, and equal numbers."""
    model = net()
    teacher = net()

    @lockstep.objective
    def distilled(given, batch):
        return (model(batch[0]) - teacher(batch[0])).square().mean() * SETTINGS.beta + float("nan") * BETA

    surroundings = Surroundings(distilled, model)
    surroundings.note()
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.eval()
    SETTINGS.unused += 1
    SETTINGS.beta = float(str(SETTINGS.beta))
    surroundings.check()
    with torch.no_grad():
        teacher[0].weight.mul_(2)
    with pytest.raises(ExactError, match="'teacher' was changed since"):
        surroundings.check()


def stepped(devices, anew):
    """The digest of a run whose teacher and number change between its steps."""
    model, teacher, beta = net(), net(), 1.0

    @lockstep.objective
    def distilled(given, batch):
        return (given(batch[0]) - teacher(batch[0])).square().mean() * beta

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.wrap(model, optimizer, distilled, devices=devices, shards=4, threads=1) as trainer:
        assert len(trainer.devices) == devices
        trainer.step(BATCH)
        trainer.step(BATCH)
        beta = 2.0
        if not anew:
            trainer.step(BATCH)
        trainer.close()
        trainer.step(BATCH)
        with torch.no_grad():
            teacher[0].weight.mul_(0.5)
        if not anew:
            trainer.step(BATCH)
        trainer.close()
        trainer.step(BATCH)
        return trainer.digest()


def test_workers_that_are_started_anew_have_it():
    assert stepped(1, anew=True) == stepped(2, anew=True)


def test_a_step_with_workers_that_have_it_not():
    with pytest.raises(ExactError) as caught:
        stepped(2, anew=False)
    assert str(caught.value) == (
        "What a loss takes from around it stays in the workers as it was when they were started. 'beta' was changed "
        "since. Put it into the batch or into a buffer of the model, call trainer.close() after such a change, which "
        "starts them anew, or use devices=1."
    )
    stepped(1, anew=False)


def test_workers_that_verify_starts_do_not_hide_it():
    model, beta = net(), 1.0

    def scaled(outputs, targets):
        return F.cross_entropy(outputs, targets) * beta

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.wrap(model, optimizer, scaled, devices=2, shards=4, threads=1) as trainer:
        trainer.step(BATCH)
        beta = 2.0
        for use in (lambda: trainer.verify(BATCH, steps=1, devices=(1, 2), batch_size=16), lambda: trainer.step(BATCH)):
            with pytest.raises(ExactError, match="'beta' was changed since"):
                use()
        trainer.close()
        assert trainer.verify(BATCH, steps=1, devices=(1, 2), batch_size=16).equal
        trainer.step(BATCH)


def test_without_the_promise_nothing_is_compared():
    model, beta = net(), 1.0

    def scaled(outputs, targets):
        return F.cross_entropy(outputs, targets) * beta

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.wrap(model, optimizer, scaled, devices=2, shards=4, exact=False) as trainer:
        assert len(trainer.devices) == 2
        trainer.step(BATCH)
        beta = 2.0
        trainer.step(BATCH)
