"""Which blocks, losses and optimizers are known to draw nothing."""

import mxnet as mx
import pytest
from mxnet import gluon
from mxnet.gluon import nn

from lockstep.backends.mxnet.criterion import CrossEntropy
from lockstep.backends.mxnet.draws import Watch, by_optimizer

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


@pytest.mark.parametrize(
    ("block", "draws"),
    [
        (lambda: held(nn.Dense(3), nn.BatchNorm(), nn.Dropout(0.0)), False),
        (lambda: held(nn.Dense(3), held(nn.Dropout(0.1))), True),
        (lambda: held(nn.Dense(3), Plain()), False),
        (lambda: held(nn.Dense(3), Drawing()), True),
        (lambda: held(Leaky()), True),
        (lambda: held(Training()), True),
        (lambda: held(nn.HybridLambda("relu")), False),
        (lambda: held(nn.HybridLambda(lambda F, x: F.random.uniform_like(x))), True),
        (lambda: nn.Lambda("relu"), True),  # not known, so assumed
        (lambda: Eager(), True),
        (hooked, True),
        (lambda: gluon.rnn.LSTM(4), True),
        (lambda: gluon.model_zoo.vision.resnet18_v1(), False),
        (lambda: gluon.model_zoo.vision.alexnet(), True),
    ],
)
def test_blocks(block, draws):
    watch = Watch(block(), LOSS)
    assert [watch.may_draw(1), watch.may_draw(1)] == [draws, draws]


@pytest.mark.parametrize(
    ("loss", "draws"), [(None, False), (LOSS, False), (CrossEntropy(), False), (lambda out, y: out, True)]
)
def test_losses(loss, draws):
    assert Watch(nn.Dense(3), loss).may_draw(1) == draws


class Noisy(mx.optimizer.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "draws"), [(mx.optimizer.Adam(), False), (mx.optimizer.SGLD(), True), (Noisy(), True)]
)
def test_optimizers(optimizer, draws):
    assert by_optimizer(optimizer) == draws
