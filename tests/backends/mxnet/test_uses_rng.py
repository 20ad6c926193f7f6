"""Which blocks, losses and optimizers are known to draw nothing."""

import mxnet as mx
import pytest
from mxnet import gluon
from mxnet.gluon import nn

from backends.mxnet.models import BATCH, net, wrapped
from lockstep.backends.mxnet.cross_entropy import CrossEntropy
from lockstep.backends.mxnet.uses_rng import DrawDetector, may_optimizer_draw

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


class Plain(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.relu(x)


class Drawing(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return x + F.random.normal_like(x)


class Leaky(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.LeakyReLU(x, act_type="rrelu")


class Training(gluon.HybridBlock):
    """Draws in a training pass only."""

    def hybrid_forward(self, F, x):
        return F.Dropout(x, p=0.5) if mx.autograd.is_training() else x


class Eager(gluon.Block):
    def forward(self, x):
        return x


def hooked():
    made = nn.Dense(3)
    made.register_forward_hook(lambda *arguments: None)
    return made


def held(*layers):
    made = nn.HybridSequential()
    made.add(*layers)
    return made


class Switched(gluon.HybridBlock):
    """Draws when the script says so."""

    noise = False

    def hybrid_forward(self, F, x):
        return x + F.random.normal_like(x) if self.noise else x


def hybridized(made):
    """The block with its graph, as a training pass makes it."""
    made.initialize(force_reinit=True)
    made.hybridize()
    with mx.autograd.train_mode():
        made._build_cache(mx.nd.ones((2, 4)))
    return made


def symbols(*operators):
    """A graph from elsewhere."""
    data = graph = mx.sym.var("data", dtype="float32")
    for operator in operators:
        graph = operator(graph)
    return gluon.SymbolBlock([graph], [data])


@pytest.mark.parametrize(
    ("block", "draws"),
    [
        (lambda: held(nn.Dense(3), nn.BatchNorm(), nn.Dropout(0.0)), False),
        (lambda: held(nn.Dense(3), held(nn.Dropout(0.1))), True),
        (lambda: hybridized(held(nn.Dense(3, in_units=4), Plain())), False),
        (lambda: held(nn.Dense(3), hybridized(Plain())), False),
        (lambda: hybridized(held(nn.Dense(3, in_units=4), Drawing())), True),
        (lambda: hybridized(Leaky()), True),
        (lambda: hybridized(Training()), True),
        (lambda: hybridized(nn.HybridLambda("relu")), False),
        (lambda: hybridized(nn.HybridLambda(lambda F, x: F.random.uniform_like(x))), True),
        (lambda: symbols(mx.sym.relu), False),
        (lambda: symbols(mx.sym.relu, mx.sym.Dropout), True),
        # not known, so assumed
        (lambda: held(nn.Dense(3, in_units=4), Plain()), True),
        (lambda: nn.HybridLambda("relu"), True),
        (lambda: nn.Lambda("relu"), True),
        (lambda: Eager(), True),
        (hooked, True),
        (lambda: gluon.rnn.LSTM(4), True),
        (lambda: gluon.model_zoo.vision.resnet18_v1(), False),
        (lambda: gluon.model_zoo.vision.alexnet(), True),
    ],
)
def test_blocks(block, draws):
    detector = DrawDetector(block(), LOSS)
    assert [detector.may_draw(), detector.may_draw()] == [draws, draws]


def test_only_the_current_graph_of_a_block_counts():
    block = hybridized(held(nn.Dense(3, in_units=4), Switched()))
    detector = DrawDetector(block, LOSS)
    assert not detector.may_draw()
    block[1].noise = True
    assert not detector.may_draw()  # the graph stays what it was
    block.hybridize()
    assert detector.may_draw()
    assert DrawDetector(hybridized(block), LOSS).may_draw()
    assert detector.may_draw()
    block[1].noise = False
    hybridized(block)
    assert not detector.may_draw()
    block.hybridize(False)
    assert detector.may_draw()


@pytest.mark.parametrize("graph", [False, True])
def test_randomness_switched_on_later_is_seeded(graph):
    """On any number of contexts, and whatever was drawn before."""
    found = set()
    for devices in (1, 2, 3):
        block = net(norm=False)
        block.add(Switched())
        if graph:
            block.hybridize()
        with wrapped(block, devices=devices) as trainer:
            trainer.step(BATCH)
            block[-1].noise = True
            if graph:
                block.hybridize()
            mx.random.seed(devices)
            trainer.step(BATCH)
            found.add(trainer.digest())
    assert len(found) == 1


@pytest.mark.parametrize(
    ("loss", "draws"), [(None, False), (LOSS, False), (CrossEntropy(), False), (lambda out, y: out, True)]
)
def test_losses(loss, draws):
    assert DrawDetector(nn.Dense(3), loss).may_draw() == draws


class Noisy(mx.optimizer.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "draws"), [(mx.optimizer.Adam(), False), (mx.optimizer.SGLD(), True), (Noisy(), True)]
)
def test_optimizers(optimizer, draws):
    assert may_optimizer_draw(optimizer) == draws
