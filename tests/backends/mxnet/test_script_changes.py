"""The script's block, optimizer and settings: what it changes counts, what is not Lockstep's stays as it was."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd, npx
from mxnet.gluon import nn

from backends.mxnet.models import BATCH, SGD, X, Y, loss, net, same, weights, wrapped
from lockstep.backends.mxnet import settings

CONTEXTS = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]


def digest(change, devices, steps=2, **options):
    """The digest after a step, a change by the script, and more steps."""
    block = net()
    optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
    with wrapped(block, optimizer, devices=devices, **options) as trainer:
        assert len(trainer.devices) == devices
        trainer.step(BATCH)
        change(block, optimizer, trainer)
        for _ in range(steps):
            trainer.step(BATCH)
        return trainer.digest()


def nothing(block, optimizer, trainer):
    pass


def set_data(block, optimizer, trainer):
    block[0].weight.set_data(nd.ones(block[0].weight.shape))


def write_in_place(block, optimizer, trainer):
    block[0].weight.data()[:] = 0.5


def write_statistics(block, optimizer, trainer):
    block[1].running_mean.data()[:] = 0.5


def learning_rate(block, optimizer, trainer):
    optimizer.set_learning_rate(0.01)


def learning_rates(block, optimizer, trainer):
    trainer.learning_rates = (0.02,)


def multiplier(block, optimizer, trainer):
    block[0].weight.lr_mult = 0.0


def freeze(block, optimizer, trainer):
    block[0].collect_params().setattr("grad_req", "null")


def freeze_below(block, optimizer, trainer):
    """So far that no backward pass comes to the batch norm, which counts there."""
    block[0].collect_params().setattr("grad_req", "null")
    block[1].gamma.grad_req = block[1].beta.grad_req = "null"


def freeze_a_weight(block, optimizer, trainer):
    block[3].weight.grad_req = "null"


def reinitialize(block, optimizer, trainer):
    mx.random.seed(9)
    block[0].initialize(mx.init.Xavier(), force_reinit=True)


CHANGES = [
    *(set_data, write_in_place, write_statistics, learning_rate, learning_rates, multiplier, freeze, reinitialize),
    *(freeze_below, freeze_a_weight),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_script_changes_reaches_every_replica(change):
    found = {digest(change, devices) for devices in (1, 2, 3)}
    assert len(found) == 1
    assert digest(nothing, 1) not in found


def test_a_frozen_layer_stays_and_trains_again():
    block = net()
    with wrapped(block, devices=2) as trainer:
        trainer.step(BATCH)
        block[0].collect_params().setattr("grad_req", "null")
        before = weights(block)
        trainer.step(BATCH)
        after = weights(block)
        assert before["0.weight"].tobytes() == after["0.weight"].tobytes()
        assert before["3.weight"].tobytes() != after["3.weight"].tobytes()
        block[0].collect_params().setattr("grad_req", "write")
        trainer.step(BATCH)
        assert weights(block)["0.weight"].tobytes() != after["0.weight"].tobytes()


def test_a_trainer_with_some_of_the_parameters():
    block = net()
    block(nd.array(X))
    chosen = gluon.Trainer(block[3].collect_params(), "sgd", {"learning_rate": 0.1})
    before = weights(block)
    with wrapped(block, chosen, devices=2) as trainer:
        trainer.step(BATCH)
    after = weights(block)
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {"3.weight", "3.bias", "1.running_mean", "1.running_var"}


@pytest.mark.parametrize("layer", [0, 3, 4])
def test_a_trainer_with_some_of_the_parameters_on_any_number_of_contexts(layer):
    """What it does not hold has gradients all the same, so the batch norm under it counts everywhere."""
    found = set()
    for devices in (1, 2, 3):
        block = net()
        block(nd.array(X))
        chosen = gluon.Trainer(block[layer].collect_params(), "sgd", {"learning_rate": 0.1})
        with wrapped(block, chosen, devices=devices) as trainer:
            trainer.step(BATCH)
            trainer.step(BATCH)
            found.add(trainer.digest())
    assert len(found) == 1


@pytest.mark.parametrize("initialized_on", [CONTEXTS[:2], CONTEXTS[:1], CONTEXTS])
def test_a_block_initialized_on_several_contexts_before_its_shapes_are_known(initialized_on):
    """The first batch decides the shapes; the bits depend on the contexts neither of the script nor of the trainer."""
    found = set()
    for context, devices in ((initialized_on, 2), (initialized_on, 1), ([mx.cpu(0)], 1)):
        mx.random.seed(0)
        block = nn.Sequential()
        block.add(nn.Dense(8, activation="relu"), nn.BatchNorm(), nn.Dense(10))
        block.initialize(init=mx.init.Normal(sigma=0.01), ctx=context)
        with pytest.raises(gluon.parameter.DeferredInitializationError):
            block[0].weight.data()
        with wrapped(block, devices=devices) as trainer:
            outputs = trainer(nd.array(X)).asnumpy().tobytes()
            trainer.step(BATCH)
            copies = {copy.data.tobytes() for copy in trainer.copies("model.0.weight")}
            assert len(copies) == 1
            found.add((outputs, *copies, trainer.digest()))
    assert len(found) == 1


def test_the_block_is_an_ordinary_one_between_the_steps(tmp_path):
    """On one context, with gradients of its own; the mean of three equal copies would not be the copy."""
    block = net()
    with wrapped(block, devices=3) as trainer:
        trainer.step(BATCH)
        assert [each.list_ctx() for each in block.collect_params().values()] == [[mx.cpu(0)]] * 10
        block.save_parameters(str(tmp_path / "saved"))
        other = net()
        other.load_parameters(str(tmp_path / "saved"))
        assert same(weights(other), weights(block))
        before = trainer.digest()
        with autograd.record():
            value = loss()(block(nd.array(X)), nd.array(Y))
        value.backward()
        assert all(each.grad().asnumpy().any() for each in block[3].collect_params().values())
        assert trainer.digest() != before  # the script's own pass counts in the statistics


def test_a_block_initialized_on_several_contexts():
    block = net()
    block.collect_params().reset_ctx(CONTEXTS)
    with wrapped(block, devices=2) as trainer:
        trainer.step(BATCH)
        trainer.step(BATCH)
        digests = {digest(nothing, 1, steps=1), digest(nothing, 2, steps=1)}
        assert len(digests) == 1
    for each in block.collect_params().values():
        assert len({data.asnumpy().tobytes() for data in each.list_data()}) == 1


def test_a_script_that_records_and_draws():
    """Neither does its tape hold the step, nor do its draws tell on how many contexts it was computed."""
    drawn = set()
    for devices in (1, 3):
        with wrapped(net(dropout=0.5), devices=devices) as trainer, autograd.record():
            trainer.step(BATCH)
            assert autograd.is_recording()
            assert autograd.is_training()
            drawn.add(mx.random.uniform(shape=(4,)).asnumpy().tobytes())
    assert len(drawn) == 1


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_are_set_while_computing_and_restored(threads):
    seen = []

    def count(outputs, targets):
        seen.append(settings.read_num_threads(outputs.context))
        return loss()(outputs, targets)

    before = [settings.read_num_threads(context) for context in CONTEXTS]
    with wrapped(net(), criterion=count, devices=2, threads=threads) as trainer:
        trainer.step(BATCH)
    assert set(seen) == {threads}
    assert [settings.read_num_threads(context) for context in CONTEXTS] == before


def test_default_threads_follow_from_the_engines_number():
    with wrapped(net(), devices=2, threads=None) as trainer:
        trainer.step(BATCH)
        assert trainer.session.run.threads == max(1, settings.read_num_threads(mx.cpu(0)) // 8)


def test_an_evaluation_between_the_steps_changes_no_bits():
    """oneDNN keeps weights in an order of its own after an evaluation."""
    assert digest(lambda block, optimizer, trainer: trainer.evaluate(BATCH), 2) == digest(nothing, 2)
    assert digest(lambda block, optimizer, trainer: block(nd.array(X)), 2) == digest(nothing, 2)


def test_graphs_change_no_bits():
    digests = set()
    for devices, flags in ((1, None), (1, {}), (3, {}), (1, {"static_alloc": True}), (3, {"static_alloc": True})):
        block = net(dropout=0.3)
        if flags is not None:
            block.hybridize(**flags)
        with wrapped(block, devices=devices) as trainer:
            trainer.step(BATCH)
            trainer.step(BATCH)
            digests.add(trainer.digest())
    assert len(digests) == 1


def test_shapes_from_the_first_batch_or_the_first_state(tmp_path):
    with wrapped(net(), devices=2) as trainer:
        assert trainer.predict(X).shape == (61, 10)
        trainer.step(BATCH)
        trainer.save(tmp_path / "saved")
        trainer.step(BATCH)
        after = trainer.digest()
    fresh = net()
    with wrapped(fresh, devices=3) as trainer:
        trainer.restore(tmp_path / "saved")
        trainer.step(BATCH)
        assert trainer.digest() == after


@pytest.mark.parametrize(
    "first",
    [
        lambda trainer: trainer.predict(X),
        lambda trainer: trainer.evaluate(BATCH),
        lambda trainer: trainer.step(BATCH),
    ],
)
def test_the_first_values_are_those_of_the_scripts_own_seed(first):
    block = net(dropout=0.5)
    with wrapped(block, ("sgd", {"learning_rate": 0.0}), devices=2) as trainer:
        first(trainer)
    plain = net(dropout=0.5)
    plain(nd.array(X))
    found, expected = weights(block), weights(plain)
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected if "running" not in name)


def test_a_run_resumes_from_its_checkpoint(tmp_path):
    digests = set()
    for epochs in ([3], [1, 2, 3]):
        folder = tmp_path / str(len(epochs))
        for epoch, devices in zip(epochs, (1, 3, 2), strict=False):
            with wrapped(net(dropout=0.3), "adam", devices=devices) as trainer:
                trainer.fit(BATCH, epochs=epoch, batch_size=16, checkpoint=folder, verbose=0)
                last = trainer.digest()
        digests.add(last)
    assert len(digests) == 1


@pytest.fixture
def numpy_arrays():
    npx.set_np()
    yield
    npx.reset_np()


def own(outputs, targets):
    return -npx.pick(npx.log_softmax(outputs), targets).mean()


@pytest.mark.usefixtures("numpy_arrays")
@pytest.mark.parametrize("criterion", [None, own])
def test_mx_np(criterion):
    digests = set()
    for devices, hybridized in ((1, False), (2, True), (3, False), (8, True)):
        block = net(dropout=0.3, hybridized=hybridized)
        metrics = {"accuracy": "accuracy", "wrong": lambda out, y: out.argmax(axis=1) != y}
        with wrapped(block, "adam", criterion, devices, metrics=metrics, clip_norm=1.0) as trainer:
            trainer.step((mx.np.array(X), mx.np.array(Y)))
            logs = trainer.step(BATCH)
            assert logs["accuracy"] == pytest.approx(1 - logs["wrong"])
            assert isinstance(trainer(X), mx.np.ndarray)
            assert isinstance(block[0].weight.data(), mx.np.ndarray)
            digests.add(trainer.digest())
    assert len(digests) == 1


class Gate(gluon.HybridBlock):
    """Draws, unseen by anybody who only looks at the layers."""

    def hybrid_forward(self, F, x):
        return x * F.random.uniform_like(x)


class Eager(gluon.Block):
    """Draws from Python."""

    def forward(self, x):
        return x * mx.nd.random.uniform(shape=x.shape, ctx=x.context)


class Running(gluon.Block):
    """Keeps a statistic of its own, from Python."""

    def __init__(self):
        super().__init__()
        self.level = self.params.get("level", shape=(1,), init="zeros", grad_req="null")

    def forward(self, x):
        level = self.level.data(x.context)
        if autograd.is_training():
            level[:] = 0.9 * level + 0.1 * x.mean()
        return x - level


@pytest.mark.parametrize("layer", [Gate, Eager, Running, lambda: nn.Dropout(0.5), lambda: nn.LayerNorm()])
def test_custom_layers(layer):
    digests = []
    for devices in (1, 2, 3):
        mx.random.seed(3)
        block = nn.Sequential()
        block.add(nn.Flatten(), layer(), nn.Dense(10))
        block.initialize()
        with wrapped(block, devices=devices) as trainer:
            trainer.step(BATCH)
            trainer.step(BATCH)
            digests.append(trainer.digest())
    assert len(set(digests)) == 1


def test_an_optimizer_that_draws():
    digests = {digest_of_sgld(devices) for devices in (1, 2, 3)}
    assert len(digests) == 1


def digest_of_sgld(devices):
    with wrapped(net(), "sgld", devices=devices) as trainer:
        trainer.step(BATCH)
        trainer.step(BATCH)
        return trainer.digest()


def test_an_embedding_whose_rows_are_not_in_every_shard():
    """A parameter that no shard reaches is not decayed; one that some reach gets zeros from the others."""

    class Two(gluon.Block):
        def __init__(self):
            super().__init__()
            self.one = nn.Dense(10, in_units=12)
            self.other = nn.Dense(10, in_units=12)

        def forward(self, x):
            return self.one(x) if float(x[0, 0].asscalar()) > 0 else self.other(x)

    digests = set()
    x, sure = X[:, 0, 0], abs(X[:, 0, 0])
    for devices in (1, 2, 3):
        mx.random.seed(1)
        block = Two()
        block.initialize()
        with wrapped(block, SGD, devices=devices) as trainer:
            before = weights(block)
            trainer.step((sure, Y))
            after = weights(block)
            assert before["other.weight"].tobytes() == after["other.weight"].tobytes()
            trainer.step((x, Y))
            assert after["other.weight"].tobytes() != weights(block)["other.weight"].tobytes()
            digests.add(trainer.digest())
    assert len(digests) == 1


def test_labels_and_inputs_of_numpys_types():
    """numpy's float64 becomes float32, as mx.nd.array has it, so that np.random feeds a block of float32."""
    digests = set()
    for batch in ((X.astype("float64"), Y), (X, Y.astype("uint8")), (nd.array(X), nd.array(Y)), (X[::1], list(Y))):
        with wrapped(net(), devices=2) as trainer:
            trainer.step((batch[0], np.array(batch[1]) if isinstance(batch[1], list) else batch[1]))
            digests.add(trainer.digest())
    assert len(digests) == 1


@pytest.mark.parametrize("given", [[0, 1], [3], [5, 2, 7]])
def test_contexts_as_devices(given):
    """The block lies on the first of them, and the bits do not tell which they are."""
    contexts = [mx.cpu(index) for index in given]
    block = net(dropout=0.5)
    with wrapped(block, devices=contexts) as trainer:
        trainer.step(BATCH)
        assert trainer.devices == tuple(f"cpu:{index}" for index in given)
        assert {each.list_ctx()[0] for each in block.collect_params().values()} == {contexts[0]}
        assert trainer(X).context == contexts[0]
        found = trainer.digest()
    with wrapped(net(dropout=0.5)) as trainer:
        trainer.step(BATCH)
        assert trainer.digest() == found


def test_a_symbol_block():
    """On any number of contexts."""
    found = set()
    for devices in (1, 2, 3):
        data = mx.sym.var("data", dtype="float32")
        block = gluon.SymbolBlock([mx.sym.FullyConnected(mx.sym.flatten(data), num_hidden=10, name="last")], [data])
        block.initialize(mx.init.One())
        with wrapped(block, devices=devices) as trainer:
            trainer.step(BATCH)
            found.add(trainer.digest())
    assert len(found) == 1
