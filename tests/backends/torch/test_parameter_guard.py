"""Parameters that a forward pass writes: refused with several shards, because every shard makes a pass."""

import copy

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ExactError

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)) + 1
IDS = torch.randint(0, 9, (24, 4), generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


class MaxNorm(nn.Module):
    """torch's own embedding with a largest norm, to which it scales the rows that a batch looks up."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 5, max_norm=1.0), nn.Linear(5, 3)

    def forward(self, ids):
        return self.last(self.embedding(ids).mean(1))


class Momentum(nn.Module):
    """A momentum encoder that is updated in the forward pass, like MoCo's."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(5, 3), nn.Linear(5, 3).requires_grad_(False)

    def follow(self):
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data = 0.9 * key.data + 0.1 * query.data

    def forward(self, x):
        self.follow()
        return self.query(x) + self.key(x)


class MomentumInPlace(Momentum):
    def follow(self):
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data.mul_(0.9).add_(query.data, alpha=0.1)


class Clipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        with torch.no_grad():
            self.last.weight.clamp_(-0.1, 0.1)
        return self.last(x)


class Replaced(Clipped):
    """A codebook that is a new parameter after every pass."""

    def forward(self, x):
        outputs = self.last(x)
        self.last.bias = nn.Parameter(0.5 * self.last.bias)
        return outputs


class Teacher(nn.Module):
    """A mean teacher in a list, where the optimizer does not find it."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(5, 3)
        self.held = {"teachers": [copy.deepcopy(self.student)]}

    def forward(self, x):
        with torch.no_grad():
            for mine, theirs in zip(self.held["teachers"][0].parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.9).add_(0.1 * theirs + 0.01 * x.mean())
            soft = self.held["teachers"][0](x)
        return self.student(x) + soft


class Normed(nn.Module):
    """A frozen network in a list, whose running statistics change."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.frozen = [nn.BatchNorm1d(5)]

    def forward(self, x):
        return self.last(self.frozen[0](x).detach())


def wrapped(make, devices=1, shards=4, **options):
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.5)
    return lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=shards, threads=1, **options)


def batch(make):
    return (IDS if make is MaxNorm else X), Y


WRITING = [
    (MaxNorm, "'embedding.weight' of Embedding, by max_norm=1.0. Every shard"),
    (Momentum, "'key.weight' of Linear. Every shard"),
    (MomentumInPlace, "'key.weight' of Linear. Every shard"),
    (Clipped, "'last.weight' of Linear. Every shard"),
    (Replaced, "'last.bias' of Linear. Every shard"),
    (Teacher, "'held.weight' of Linear. Every shard"),
    (Normed, "'frozen.running_mean' of BatchNorm1d. Every shard"),
]


@pytest.mark.parametrize(
    ("make", "message", "devices", "shards"),
    [*((*each, 1, 4) for each in WRITING), *((*each, 2, 2) for each in WRITING if each[0] in (MaxNorm, Replaced))],
)
def test_a_pass_that_writes_a_parameter_is_refused_and_changes_nothing(make, message, devices, shards):
    with wrapped(make, devices, shards) as trainer:
        assert len(trainer.devices) == devices
        before = trainer.digest()
        with pytest.raises(ExactError) as caught:
            trainer.step(batch(make))
        is_hidden = make in (Teacher, Normed)
        way_out = "Make that module a submodule (self.name = module), and write" if is_hidden else "Write"
        assert str(caught.value).startswith(
            f"A forward pass has written to {message} makes a pass, so what the passes write would depend on the "
            f"number of devices. {way_out} it between the steps, in the script"
        )
        assert trainer.digest() == before


@pytest.mark.parametrize("make", [MaxNorm, Clipped])
def test_one_shard_equals_the_plain_loop(make):
    torch.manual_seed(0)
    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    trainer = wrapped(make, shards=1)
    inputs, targets = batch(make)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
        trainer.step((inputs, targets))
    for one, other in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_pass_that_begins_to_write_later_is_refused():
    class Late(Clipped):
        warm = False

        def forward(self, x):
            return super().forward(x) if self.warm else self.last(x)

    trainer = wrapped(Late)
    for _ in range(3):
        trainer.step((X, Y))
    Late.warm = True
    with pytest.raises(ExactError, match=r"written to 'last\.weight' of Linear\. "):
        trainer.step((X, Y))


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_evaluation_that_writes_a_parameter_is_refused(method):
    trainer = wrapped(Clipped)
    with pytest.raises(ExactError, match=r"written to 'last\.weight' of Linear\. "):
        getattr(trainer, method)((X, Y) if method == "evaluate" else X)


def test_such_a_model_trains_if_not_exact():
    trainer = wrapped(Momentum, exact=False)
    for _ in range(2):
        trainer.step((X, Y))


def test_what_the_script_writes_between_the_steps_reaches_every_replica():
    class Following(Momentum):
        def forward(self, x):
            return self.query(x) + self.key(x)

    found = set()
    for devices in (1, 2):
        with wrapped(Following, devices) as trainer:
            assert len(trainer.devices) == devices
            for _ in range(4):
                trainer.step((X, Y))
                trainer.model.follow()
            found.add(trainer.digest())
    assert len(found) == 1


class Centers(nn.Module):
    """A loss with parameters that a pass moves."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def forward(self, outputs, targets):
        with torch.no_grad():
            self.centers[targets] += 0.1 * outputs
        return nn.functional.cross_entropy(outputs, targets)


def test_parameters_of_a_loss_are_checked():
    net = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = lockstep.wrap(net, optimizer, Centers(), devices=1, shards=4, threads=1)
    with pytest.raises(ExactError, match=r"written to 'centers' of Centers\."):
        trainer.step((X, Y))
