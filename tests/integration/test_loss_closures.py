"""Changes of what a loss refers to reach the workers, or are refused if workers import it by themselves."""

import functools
import re
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.backends.torch.loss_references import LossReferences
from lockstep.errors import ExactError

torch.manual_seed(6)
BATCH = torch.randn(16, 13), torch.randint(5, (16,))
WAYS_OUT = (
    "Put a number into the batch or into a buffer of the model. Make another network a part of the wrapped model: "
    "nn.ModuleDict({'net': net, 'teacher': teacher}), with an objective that calls both (docs/several-optimizers.md). "
    "Or call trainer.close() after such a change, so that the next step starts new workers, or use devices=1."
)
BETA = 1.0
SETTINGS = types.SimpleNamespace(beta=1.0, unused=1.0, inner=types.SimpleNamespace(alpha=1.0))
TABLE = {"beta": 1.0}
TENSORS = {"weights": torch.ones(5), "epsilon": 0.1}
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


def of_an_inner_object(outputs, targets):
    return F.cross_entropy(outputs, targets) * SETTINGS.inner.alpha


class Base:
    """Settings of a script."""

    gamma = 1.0


class Config(Base):
    """More of them."""


def of_a_class(outputs, targets):
    return F.cross_entropy(outputs, targets) * Config.gamma


def of_a_table_of_tensors(outputs, targets):
    return F.cross_entropy(outputs, targets, TENSORS["weights"])


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


def set_inner():
    SETTINGS.inner.alpha += 0.5


def set_class():
    Base.gamma += 0.5


def replace_tensor():
    TENSORS["weights"] = TENSORS["weights"].clone()


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


def average_teacher():
    FOCAL.teacher.weight.data.mul_(0.5)


def rest_teacher():
    FOCAL.teacher.training ^= True


CASES = [  # a loss, a change, its name, and whether the workers can be sent it: not what they import by themselves
    (of_a_global, set_beta, "BETA", False),
    (of_a_helper, set_beta, "BETA", False),
    (lockstep.objective(lambda model, batch: of_a_global(model(batch[0]), batch[1])), set_beta, "BETA", False),
    (Criterion(), set_beta, "BETA", False),
    (of_an_object, set_settings, "SETTINGS.beta", False),
    (of_an_inner_object, set_inner, "SETTINGS.inner.alpha", False),
    (of_a_class, set_class, "Config.gamma", False),
    (of_a_table, set_table, "TABLE", False),
    (of_a_table_of_tensors, replace_tensor, "TENSORS", False),
    (of_an_array, set_numbers, "NUMBERS", False),
    (of_a_tensor, set_weights, "WEIGHTS", False),
    (of_a_default, set_default, "factors", False),
    (functools.partial(of_a_global, factor=WEIGHTS), set_weights, "factor", True),
    (FOCAL, set_focal, "Focal.g", True),
    (FOCAL, train_teacher, "Focal.teacher", True),
    (FOCAL, average_teacher, "Focal.teacher", True),
    (FOCAL, rest_teacher, "Focal.teacher", True),
    (FOCAL.method, set_focal, "self.g", True),
]


@pytest.mark.parametrize("loss, change, name, is_sent", CASES)
def test_a_change_is_seen(loss, change, name, is_sent):
    references = LossReferences(loss, net())
    change()
    assert references.check() == 0  # nobody has got it yet
    references.start()
    assert references.check() == 0
    with references.accept_changes():
        change()  # the loss itself does it
    assert references.check() == 0
    change()
    with references.accept_changes():
        pass  # it changes nothing, and was not the one that did
    if is_sent:
        assert [references.check(), references.check()] == [1, 1]
        references.count_update()
        references.count_update()  # before this step nothing was changed, or nobody looked
        change()
        assert references.check() == 2
        references.count_update()
        change()
        message = f"{name!r}, which was changed before each of the last two steps"
    else:
        message = f"{name!r}, which was changed after the workers had imported its module"
    with pytest.raises(ExactError, match=re.escape(message)):
        references.check()


def test_a_change_before_each_of_several_evaluations_is_sent():
    references = LossReferences(FOCAL, net())
    references.start()
    for number in (1, 2, 3):
        set_focal()
        assert references.check() == number


def test_what_is_no_change():
    """The model's own, what the loss does not name, and equal numbers."""
    model = net()
    teacher = net()

    @lockstep.objective
    def distilled(given, batch):
        return (model(batch[0]) - teacher(batch[0])).square().mean() * SETTINGS.beta + float("nan") * BETA

    references = LossReferences(distilled, model)
    references.start()
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.eval()
    SETTINGS.unused += 1
    SETTINGS.beta = float(str(SETTINGS.beta))
    assert references.check() == 0
    with torch.no_grad():
        teacher[0].weight.mul_(2)
    assert references.check() == 1


def test_tensors_without_plain_memory_can_be_referred_to():
    numbers = torch.ones(3, dtype=torch.complex64)
    odd = [torch.ones(1).expand(5), torch.eye(3).to_sparse(), numbers.conj(), numbers.conj().imag]
    references = LossReferences(functools.partial(of_a_global, *odd, table=dict(enumerate(odd))), net())
    references.start()
    assert references.check() == 0
    numbers.data.mul_(2)
    assert references.check() == 1


class Weighted(nn.Module):
    """A module of the loss; a local class below has the number that it reads."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs, targets) * self.factor()


def step_with(kind, devices, anew=False):
    """The digest of a run in which a number that the loss reads, and for one a network, change between its steps."""
    model, teacher, beta = net(), net(), 1.0

    @lockstep.objective
    def distilled(given, batch):
        return (given(batch[0]) - teacher(batch[0])).square().mean() * beta

    class Scaled(nn.Module):
        def forward(self, outputs, targets):
            return F.cross_entropy(outputs, targets) * beta

    class Settings:
        factor = 1.0

    def scaled(outputs, targets):
        return F.cross_entropy(outputs, targets) * Settings.factor

    losses = {"settings": scaled, "function": distilled, "class": Scaled(), "attribute": Weighted(lambda: beta)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with lockstep.wrap(model, optimizer, losses[kind], devices=devices, shards=4, threads=1) as trainer:
        assert len(trainer.devices) == devices
        trainer.step(BATCH)
        trainer.step(BATCH)
        beta = Settings.factor = 2.0
        with torch.no_grad():
            teacher[0].weight.mul_(0.5)
        if anew:
            trainer.close()
        pids = [] if devices == 1 or anew else trainer.session.processes.pids
        for _ in range(2):
            trainer.step(BATCH)
            optimizer.param_groups[0]["lr"] = 0.05
        beta = 3.0
        trainer.step(BATCH)
        assert not pids or trainer.session.processes.pids == pids
        return trainer.digest()


def test_workers_are_sent_what_has_changed():
    """The same processes go on, with the same bits as one device and as processes that were started anew."""
    assert step_with("function", 1) == step_with("function", 2) == step_with("function", 2, anew=True)


@pytest.mark.parametrize("kind", ["class", "attribute", "settings"])
def test_workers_are_sent_what_methods_read(kind):
    assert step_with(kind, 1) == step_with(kind, 2)


def test_what_changes_before_every_step_is_refused():
    model, beta = net(), 1.0

    def annealed(outputs, targets):
        return F.cross_entropy(outputs, targets) * beta

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.wrap(model, optimizer, annealed, devices=2, shards=4, threads=1) as trainer:
        trainer.step(BATCH)
        beta = 2.0
        trainer.step(BATCH)
        beta = 3.0
        with pytest.raises(ExactError) as caught:
            trainer.step(BATCH)
        assert str(caught.value) == (
            "The loss uses 'beta', which was changed before each of the last two steps, and each change sends the "
            f"whole model to the workers. {WAYS_OUT}"
        )
        trainer.close()
        trainer.step(BATCH)
        trainer.digest()


def test_what_workers_import_by_themselves_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.wrap(model, optimizer, of_a_table, devices=2, shards=4, threads=1) as trainer:
        trainer.step(BATCH)
        set_table()
        with pytest.raises(ExactError) as caught:
            trainer.step(BATCH)
        assert str(caught.value) == (
            "The loss uses 'TABLE', which was changed after the workers had imported its module, so they have the old "
            f"value. {WAYS_OUT}"
        )


def test_calls_in_this_process_and_workers_that_verify_starts_do_not_hide_it():
    found = []
    for devices in (1, 2):
        model, beta = net(), 1.0

        def scaled(outputs, targets):
            return F.cross_entropy(outputs, targets) * beta  # noqa: B023

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.wrap(model, optimizer, scaled, devices=devices, shards=4, threads=1) as trainer:
            beta = 0.5  # before the first step, which calls the loss in this process to see whether it is a mean
            trainer.step(BATCH)
            trainer.step(BATCH)
            beta = 2.0
            assert trainer.verify(BATCH, steps=1, devices=(1, 2), batch_size=16).equal
            trainer.step(BATCH)
            found.append(trainer.digest())
    assert found[0] == found[1]


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
