"""One shard on one context is the loop that gluon's tutorials write, bit for bit."""

import mxnet as mx
import pytest
from mxnet import autograd, gluon, nd

from backends.mxnet.models import BATCH, X, Y, loss, net, same, weights, wrapped

STEPS = 3


def plain(optimizer, numbers, block, data=BATCH, criterion=None, held=None):
    trainer = gluon.Trainer((held or block).collect_params(), optimizer, numbers, update_on_kvstore=False)
    criterion = criterion or loss()
    x, y = (nd.array(each, dtype=each.dtype) for each in data)
    for _ in range(STEPS):
        with autograd.record():
            value = criterion(block(x), y)
        value.backward()
        trainer.step(len(x))
    return weights(block)


def ours(optimizer, block, data=BATCH, criterion=None, **options):
    with wrapped(block, optimizer, criterion, **{"shards": 1, **options}) as trainer:
        for _ in range(STEPS):
            trainer.step(data)
    return weights(block)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("sgd", {"learning_rate": 0.1}),
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3, "clip_gradient": 0.05}),
        ("nag", {"momentum": 0.9}),
        ("adam", {}),
        ("adadelta", {}),  # writes to its gradient
        ("lamb", {}),
        ("rmsprop", {"centered": True}),
    ],
)
@pytest.mark.parametrize("hybridized", [False, True])
def test_the_optimizers(name, numbers, hybridized):
    assert same(ours((name, numbers), net(hybridized=hybridized)), plain(name, numbers, net(hybridized=hybridized)))


@pytest.mark.parametrize(
    "given",
    [
        lambda block: "adam",
        lambda block: mx.optimizer.Adam(),
        lambda block: gluon.Trainer(block.collect_params(), "adam"),
        lambda block: gluon.Trainer(block.collect_params(), mx.optimizer.Adam(), kvstore=None),
    ],
    ids=["name", "object", "trainer", "trainer without kvstore"],
)
def test_the_forms_of_an_optimizer(given):
    block = net()
    assert same(ours(given(block), block), plain("adam", {}, net()))


def test_a_trainers_own_scale():
    """gluon divides `rescale_grad` by the batch size at every step."""
    block = net()
    trainer = gluon.Trainer(block.collect_params(), "sgd", {"rescale_grad": 0.3})
    assert same(ours(trainer, block), plain("sgd", {"rescale_grad": 0.3}, net()))
    assert trainer._optimizer.rescale_grad == 0.3


def test_the_first_step_of_a_gluon_trainer_with_previous_steps():
    block = net()
    trainer = gluon.Trainer(block.collect_params(), "sgd", {"momentum": 0.9}, update_on_kvstore=False)
    x, y = nd.array(X), nd.array(Y)
    for _ in range(2):
        with autograd.record():
            value = loss()(block(x), y)
        value.backward()
        trainer.step(len(x))
    with wrapped(block, trainer, shards=1) as exact:
        exact.step(BATCH)
    assert same(weights(block), plain("sgd", {"momentum": 0.9}, net()))


def half_frozen():
    block = net()
    block[1].gamma.grad_req = block[0].weight.grad_req = "null"
    return block


@pytest.mark.parametrize("make", [net, half_frozen])
@pytest.mark.parametrize("layer", [1, 4])
def test_a_trainer_with_some_of_the_parameters(make, layer):
    """The others have gradients too, so the batch norm counts as it does in the plain loop."""
    block = make()
    found = ours(gluon.Trainer(block[layer].collect_params(), "sgd", {"momentum": 0.9}), block)
    other = make()
    assert same(found, plain("sgd", {"momentum": 0.9}, other, held=other[layer]))


class Scale(gluon.HybridBlock):
    """Two float16 parameters; MXNet's CPU has no float16 matrix product."""

    def __init__(self):
        super().__init__()
        self.factor = self.params.get("factor", shape=(1, 12), init="ones", dtype="float16")
        self.offset = self.params.get("offset", shape=(1, 12), init="zeros", dtype="float16")

    def hybrid_forward(self, F, x, factor, offset):
        return F.broadcast_add(F.broadcast_mul(x, factor), offset)


def scale():
    made = Scale()
    made.initialize()
    return made


HALVES = (X[:, 0, 0].astype("float16"), (2 * X[:, 0, 1]).astype("float16"))


@pytest.mark.filterwarnings("ignore:Accumulating with float16:UserWarning")
@pytest.mark.parametrize("multi_precision", [True, False])
def test_float16(multi_precision):
    numbers = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": multi_precision}
    half = gluon.loss.L2Loss()
    assert same(ours(("sgd", numbers), scale(), HALVES, half), plain("sgd", numbers, scale(), HALVES, half))
    digests = set()
    for devices in (1, 2, 3, 8):
        with wrapped(scale(), ("sgd", numbers), half, devices) as trainer:
            trainer.step(HALVES)
            trainer.step(HALVES)
            types = {array.dtype for array in trainer.state().values()}
            digests.add(trainer.digest())
    assert len(digests) == 1
    assert ("float32" in types) == multi_precision


def test_clipping_is_gluons():
    block = net(norm=False)
    trainer = gluon.Trainer(block.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)
    with autograd.record():
        value = loss()(block(nd.array(X)), nd.array(Y)).mean()
    value.backward()
    norm = gluon.utils.clip_global_norm([each.grad() for each in block.collect_params().values()], 0.01)
    trainer.step(1)
    other = net(norm=False)
    with wrapped(other, ("sgd", {"learning_rate": 0.1}), clip_norm=0.01) as exact:
        assert exact.step(BATCH)["grad_norm"] == pytest.approx(norm, rel=1e-5)
    found, expected = weights(other), weights(block)
    assert all(abs(found[name] - expected[name]).max() < 1e-7 for name in expected)


def test_the_norm_is_the_gradients_even_if_the_optimizer_writes_to_them():
    norms = set()
    for optimizer in ("sgd", "adadelta"):
        with wrapped(net(), optimizer, devices=2) as trainer:
            norms.add(trainer.step(BATCH)["grad_norm"])
    assert len(norms) == 1


def test_a_mean_written_by_hand_equals_the_plain_loop():
    def mean(outputs, targets):
        return loss()(outputs, targets).mean()

    block = net()
    trainer = gluon.Trainer(block.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)
    for _ in range(STEPS):
        with autograd.record():
            value = mean(block(nd.array(X)), nd.array(Y))
        value.backward()
        trainer.step(1)
    assert same(ours(("sgd", {"learning_rate": 0.1}), net(), criterion=mean), weights(block))


def test_learning_rates_follow_the_schedule():
    def numbers():
        return {"lr_scheduler": mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=0.1)}

    block = net()
    optimizer = mx.optimizer.SGD(**numbers())
    with wrapped(block, optimizer, shards=1) as trainer:
        rates = []
        for _ in range(STEPS):
            trainer.step(BATCH)
            rates.append(trainer.learning_rates)
        assert rates[0] > rates[1] > rates[2]
        state = trainer.state()
        trainer.step(BATCH)
        after = trainer.digest()
        trainer.load_state(state)  # also the schedule goes back
        trainer.step(BATCH)
        assert trainer.state().keys() == state.keys()
        trainer.session.run.step -= 1
        assert trainer.digest() == after
    other = net()
    scheduled = plain("sgd", numbers(), other)
    assert same(ours(mx.optimizer.SGD(**numbers()), net()), scheduled)
