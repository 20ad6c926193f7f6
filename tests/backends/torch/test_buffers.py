"""Buffers depend on the shards, and not on which process computes them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.backends.torch import buffers
from lockstep.errors import ExactError, ModelError

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


def wrapped(net, loss=None, devices=1, **options):
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = loss or nn.CrossEntropyLoss()
    return lockstep.wrap(net, optimizer, loss, devices=devices, threads=1, **{"shards": 4, **options})


class Counting(nn.Linear):
    """Counts its calls in evaluation too, in place and in a new tensor."""

    def __init__(self):
        super().__init__(5, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.calls += 1
        self.scale = self.scale * 1.5
        return super().forward(x) * self.scale


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_evaluation_changes_no_buffer(num_devices):
    with wrapped(Counting(), devices=num_devices) as trainer:
        assert len(trainer.devices) == num_devices
        trainer.step((X, Y))
        before, loss = trainer.digest(), trainer.evaluate((X, Y))["loss"]
        rows = trainer.predict(X)
        assert trainer.evaluate((X, Y))["loss"] == loss
        assert (trainer.predict(X) == rows).all()
        trainer(X)
        assert trainer.digest() == before
        assert trainer.model.calls == 1
        assert trainer.model.scale == 1.5


class Expanded(nn.Linear):
    """One buffer that changes, and one whose elements share their memory, so that it cannot be written to."""

    def __init__(self, is_expanded):
        super().__init__(5, 3)
        self.register_buffer("calls", torch.zeros(()))
        ones = torch.ones(())
        self.register_buffer("scale", ones.expand(3) if is_expanded else ones)

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.scale


@pytest.mark.parametrize("is_expanded", [False, True])
def test_with_one_shard_buffers_are_only_compared_if_one_cannot_be_written_to(is_expanded, monkeypatch):
    calls = []
    find_differing = buffers.find_differing
    monkeypatch.setattr(buffers, "find_differing", lambda *pair: calls.append(pair) or find_differing(*pair))
    with wrapped(Expanded(is_expanded), shards=1) as trainer:
        for _ in range(2):
            trainer.step((X, Y))
        assert trainer.model.calls == 2
        assert (trainer.model.scale == 1).all()
    assert bool(calls) == is_expanded


class Running(nn.Module):
    """A loss that divides by a running mean of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs, targets):
        loss = F.cross_entropy(outputs, targets)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


def test_buffers_of_a_loss_are_averaged_like_those_of_the_model():
    found = set()
    for num_devices in (1, 2):
        with wrapped(nn.Linear(5, 3), Running(), num_devices) as trainer:
            assert len(trainer.devices) == num_devices
            for _ in range(3):
                trainer.step((X, Y))
            found.add(trainer.digest())
    assert len(found) == 1


def test_a_buffer_of_a_loss_is_the_mean_over_the_shards():
    loss = Running()
    with wrapped(nn.Linear(5, 3), loss) as trainer:
        mean = F.cross_entropy(trainer.model(X), Y).item()
        trainer.step((X, Y))
        assert loss.mean.item() == pytest.approx(0.9 + 0.1 * mean, rel=1e-6)


class Late(nn.Linear):
    """Does something to its buffers in the forward pass."""

    def __init__(self, change):
        super().__init__(5, 3)
        self.register_buffer("empty", None)
        self.register_buffer("seen", torch.zeros(2))
        self.change = change

    def forward(self, x):
        self.change(self)
        return super().forward(x)


NEW = (
    "A forward pass has added the buffer {} of shape (7,) to Late, but all buffers must exist in lockstep.wrap. "
    "Create it before, at its full size; a tensor computed from the inputs alone needs no buffer."
)
OTHER = (
    "The buffer 'seen' was float32 of (2,) before a forward pass and is {} after it, but its shape and type must not "
    "change. Create it before lockstep.wrap, at its full size, and write to it in place."
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: setattr(net, "empty", torch.ones(7)), NEW.format("'empty'")),
        (lambda net: net.register_buffer("later", torch.ones(7)), NEW.format("'later'")),
        (lambda net: setattr(net, "seen", torch.ones(len(net.seen) + 1)), OTHER.format("float32 of (3,)")),
        (lambda net: setattr(net.seen, "data", torch.ones(5)), OTHER.format("float32 of (5,)")),
        (lambda net: setattr(net, "seen", net.seen.double() + 1), OTHER.format("float64 of (2,)")),
        (lambda net: setattr(net, "seen", None), OTHER.format("None")),
    ],
    ids=["set", "registered", "grown", "resized", "another type", "gone"],
)
def test_new_and_growing_buffers_are_refused(change, message):
    net = Late(change)
    with wrapped(net) as trainer:
        before = trainer.digest()
        with pytest.raises(ModelError) as caught:
            trainer.step((X, Y))
        assert str(caught.value) == message
        trainer.predict(X)
        assert trainer.digest() == before
        assert net.empty is None
        assert net.seen.tolist() == [0, 0]
        assert list(net._buffers) == ["empty", "seen"]


def test_the_constants_of_torchs_own_losses_may_be_replaced():
    loss = nn.CrossEntropyLoss()
    with wrapped(nn.Linear(5, 3), loss) as trainer:
        trainer.step((X, Y))
        loss.weight = torch.tensor([1.0, 2.0, 3.0])
        expected = loss(trainer.model(X), Y).item()
        assert trainer.step((X, Y))["loss"] == pytest.approx(expected, rel=1e-5)


class Plain(nn.Linear):
    """Does something to its plain attributes in the forward pass."""

    def __init__(self, change):
        super().__init__(5, 3)
        self.calls, self.word, self.last = 0, "cold", None
        self.change = change

    def forward(self, x):
        self.change(self, x)
        return super().forward(x) * (1 + self.calls)


def counts(net, x):
    net.calls += 1


def settles(net, x):
    net.word = "warm"


@pytest.mark.parametrize(("change", "said"), [(counts, "'calls' of Plain from 0 to 4"), (settles, "'word' of Plain")])
def test_a_plain_attribute_that_a_forward_pass_changes_is_refused(change, said):
    net = Plain(change)
    with wrapped(net) as trainer:
        before = trainer.digest()
        with pytest.raises(ExactError) as caught:
            trainer.step((X, Y))
        assert str(caught.value).startswith(f"A forward pass has changed {said}")
        assert str(caught.value).endswith("torch.tensor(0)); or use lockstep.wrap(..., exact=False).")
        for use in (trainer.evaluate, trainer.predict):
            with pytest.raises(ExactError, match=r"^A forward pass has changed .* of Plain from"):
                use((X, Y) if use == trainer.evaluate else X)
        assert trainer.digest() == before
        assert (net.calls, net.word) == (0, "cold")
    with wrapped(Plain(change), exact=False) as trainer:
        trainer.step((X, Y))


def test_a_changed_plain_attribute_of_a_loss_is_refused():
    class Annealed(nn.CrossEntropyLoss):
        calls = 0

        def forward(self, outputs, targets):
            self.calls += 1
            return super().forward(outputs, targets) / self.calls

    with wrapped(nn.Linear(5, 3), Annealed()) as trainer:
        trainer.step((X, Y))  # there was none of its own
        with pytest.raises(ExactError, match=r"'calls' of Annealed from 4 to 8"):
            trainer.step((X, Y))


def test_a_mode_and_a_first_value_may_be_set_in_a_forward_pass():
    def sets(net, x):
        net.last = x.shape[1]
        net.size = x.shape[1]
        net.eval()

    with wrapped(Plain(sets)) as trainer:
        for _ in range(2):
            trainer.step((X, Y))
        assert (trainer.model.last, trainer.model.size) == (5, 5)


def test_the_script_may_change_a_plain_attribute_between_steps():
    net = Plain(lambda net, x: None)
    with wrapped(net) as trainer:
        trainer.step((X, Y))
        net.calls = 3
        trainer.step((X, Y))
        assert net.calls == 3
