"""What a forward pass leaves in the attributes of blocks: no number, and no array that another pass would read."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn, rnn

from backends.mxnet.models import loss, wrapped
from lockstep.errors import ExactError

X = np.random.Generator(np.random.PCG64(0)).standard_normal((32, 6)).astype("float32") + 1
Y = (np.arange(32) % 3).astype("float32")


class Plain(nn.Block):
    def __init__(self):
        super().__init__(prefix="net_")
        self.layer = nn.Dense(3, in_units=6)
        self.held = self.start()

    def start(self):
        return None

    def forward(self, x):
        return self.layer(self.change(x))

    def change(self, x):
        return x


def mean(x):
    return 0.1 * x.mean(axis=0).detach()


class Count(Plain):
    def start(self):
        return 0

    def change(self, x):
        self.held += 1
        return x * (1 + 0.01 * self.held)


class CountInNumpy(Count):
    def start(self):
        return np.float32(0)


class CountInDict(Plain):
    def start(self):
        return {"n": 0, "deep": [0.0]}

    def change(self, x):
        self.held["n"] += 1
        return x * (1 + 0.01 * self.held["n"])


class CountInList(CountInDict):
    def change(self, x):
        self.held["deep"][0] += 1
        return x * (1 + 0.01 * self.held["deep"][0])


class Text(Plain):
    def start(self):
        return ""

    def change(self, x):
        self.held += "a"
        return x * len(self.held)


@pytest.mark.parametrize(
    ("kind", "name", "before", "after"),
    [
        (Count, "held", "0", "1"),
        (CountInNumpy, "held", "0.0", "1.0"),
        (CountInDict, "held['n']", "0", "1"),
        (CountInList, "held['deep'][0]", "0.0", "1.0"),
        (Text, "held", "''", "'a'"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_pass_that_changes_a_number_is_refused(kind, name, before, after, devices):
    with made(kind, devices) as trainer:
        held, digest = repr(trainer.model.held), trainer.digest()
        with pytest.raises(ExactError) as caught:
            trainer.step((X, Y))
        assert str(caught.value) == (
            f"A forward pass has changed {'net.' + name!r} from {before} to {after}. The value would depend on the "
            "number of devices, and no checkpoint has it. Make it a parameter without a gradient: "
            "self.held = self.params.get('held', shape=(1,), init='zeros', grad_req='null') in __init__ "
            "(dtype='int64' if it counts), which the pass writes inside of autograd.pause(): "
            "self.held.data(x.ctx)[:] = value; or use lockstep.wrap(..., exact=False)."
        )
        assert (repr(trainer.model.held), trainer.digest()) == (held, digest)


class Array(Plain):
    def start(self):
        return np.zeros(6, "float32")

    def change(self, x):
        self.held = 0.9 * self.held + mean(x).asnumpy()
        return x - nd.array(self.held, ctx=x.ctx)


class ArrayInPlace(Array):
    def change(self, x):
        self.held *= 0.9
        self.held += mean(x).asnumpy()
        return x - nd.array(self.held, ctx=x.ctx)


class MxnetArray(Plain):
    def start(self):
        return nd.zeros((6,))

    def change(self, x):
        self.held = 0.9 * self.held.as_in_context(x.ctx) + mean(x)
        return x - self.held


class MxnetArrayInPlace(Plain):
    def start(self):
        return nd.zeros((6,))

    def change(self, x):
        with autograd.pause():
            self.held[:] = 0.9 * self.held + mean(x).as_in_context(self.held.ctx)
        return x - self.held.as_in_context(x.ctx)


class ArrayInDict(Plain):
    def start(self):
        return {"mean": np.zeros(6, "float32")}

    def change(self, x):
        self.held["mean"] = 0.9 * self.held["mean"] + mean(x).asnumpy()
        return x - nd.array(self.held["mean"], ctx=x.ctx)


class ArrayInList(Plain):
    def start(self):
        return [(nd.zeros((6,)),)]

    def change(self, x):
        self.held[0] = (0.9 * self.held[0][0].as_in_context(x.ctx) + mean(x),)
        return x - self.held[0][0]


class Last(Plain):
    """Adds the last shard's mean, of which there is none at first."""

    def change(self, x):
        last, self.held = self.held, mean(x)
        return x if last is None else x - last.as_in_context(x.ctx)


ARRAYS = [Array, ArrayInPlace, MxnetArray, MxnetArrayInPlace, ArrayInDict, ArrayInList, Last]


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("devices", [1, 2])
def test_an_array_that_changes_the_next_shard_is_refused(kind, devices):
    with made(kind, devices) as trainer:
        held, digest = repr(trainer.model.held), trainer.digest()
        with pytest.raises(
            ExactError, match=r"(?s)writes an array to \S*net\S*held.* that changes the results of the next shard"
        ) as e:
            trainer.step((X, Y))
        assert "self.held = self.params.get('held', shape=(6,), init='zeros', grad_req='null')" in str(e.value)
        assert (repr(trainer.model.held), trainer.digest()) == (held, digest)


class Map(Plain):
    """Leaves what it has computed for the script to look at."""

    def change(self, x):
        self.held = x * 2
        return self.held


class Record(Plain):
    def start(self):
        return []

    def change(self, x):
        self.held.append(x.mean())
        return x


class Table(Plain):
    """Is built once."""

    def change(self, x):
        if self.held is None:
            self.held = nd.arange(6)
        return x + self.held.as_in_context(x.ctx)


class Cells(Plain):
    """The cell counts its calls."""

    def start(self):
        self.cell = rnn.LSTMCell(6, input_size=6)

    def change(self, x):
        return self.cell.unroll(2, nd.stack(x, x, axis=1), merge_outputs=False)[0][-1]


class Hybrid(nn.HybridBlock):
    """Its Python runs once."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Dense(3, in_units=6), 0
        self.hybridize()

    def hybrid_forward(self, F, x):
        self.calls += 1
        return self.layer(x * self.calls)


class Counted(Plain):
    """The way out for a number."""

    def start(self):
        return self.params.get("held", shape=(1,), init="zeros", grad_req="null", dtype="int64")

    def change(self, x):
        if autograd.is_training():
            with autograd.pause():
                self.held.data(x.ctx)[:] += 1
        return x * (1 + 0.01 * self.held.data(x.ctx).astype("float32"))


class Statistic(Plain):
    """The way out for an array."""

    def start(self):
        return self.params.get("held", shape=(6,), init="zeros", grad_req="null")

    def change(self, x):
        if autograd.is_training():
            with autograd.pause():
                self.held.data(x.ctx)[:] = 0.9 * self.held.data(x.ctx) + mean(x)
        return x - self.held.data(x.ctx)


@pytest.mark.parametrize("kind", [Plain, Map, Record, Table, Cells, Hybrid, Counted, Statistic])
def test_the_digest_is_the_same_on_1_2_and_4_devices(kind):
    found = set()
    for devices in (1, 2, 4):
        with made(kind, devices) as trainer:
            assert len(trainer.devices) == devices
            for _ in range(5):
                trainer.step((X, Y))
            trainer.evaluate((X, Y), verbose=0)
            found.add(trainer.digest())
    assert len(found) == 1


def test_the_counter_counts_steps():
    with made(Counted) as trainer:
        for _ in range(3):
            trainer.step((X, Y))
        assert trainer.model.held.data().asscalar() == 3


def test_an_evaluation_leaves_attributes_as_they_were():
    with made(Count) as trainer:
        trainer.evaluate((X, Y), verbose=0)
        trainer.predict(X)
        assert trainer.model.held == 0


def test_attributes_of_a_loss_are_compared_too():
    class CountingLoss(mx.gluon.loss.SoftmaxCrossEntropyLoss):
        calls = 0

        def forward(self, *args):
            self.calls = vars(self).get("calls", 0) + 1
            return super().forward(*args) * self.calls

    criterion = CountingLoss()
    criterion.calls = 0
    with made(Plain, criterion=criterion) as trainer, pytest.raises(ExactError, match=r"\.calls' from 1 to 2"):
        trainer.step((X, Y))


@pytest.mark.parametrize("kind", [Count, Array])
def test_attributes_may_change_with_exact_false(kind):
    with made(kind, exact=False) as trainer:
        trainer.step((X, Y))
        trainer.step((X, Y))


def test_with_one_shard_an_array_is_that_of_the_plain_loop():
    with made(Array, shards=1) as trainer:
        plain = Array()
        for _ in range(3):
            trainer.step((X, Y))
            plain.change(nd.array(X))
        assert np.array_equal(trainer.model.held, plain.held)


def made(kind, devices=1, criterion=None, **options):
    mx.random.seed(0)
    block = kind()
    block.initialize(mx.init.Xavier())
    return wrapped(
        block, ("sgd", {"learning_rate": 0.1}), criterion or loss(), devices=devices, **{"shards": 4, **options}
    )
