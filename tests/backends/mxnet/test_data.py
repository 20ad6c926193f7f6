"""MXNet's arrays, of either class, and gluon's data sets: the bits are those of the same numbers in numpy."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, npx

import lockstep
from backends.mxnet.models import X, Y, net, wrapped

LABELS = Y.astype("float32")  # the type that gluon's loaders make of labels


@pytest.fixture(params=["nd", "np"])
def put(request):
    """What makes MXNet's array out of numpy's."""
    if request.param == "nd":
        yield lambda array: mx.nd.array(array, dtype=array.dtype)
    else:
        npx.set_np()
        yield lambda array: mx.np.array(array, dtype=array.dtype)
        npx.reset_np()


def examples(x, y):
    return [(x[index], y[index]) for index in range(len(x))]


SOURCES = {
    "arrays": lambda x, y: (x, y),
    "a list of batches": lambda x, y: [(x[:16], y[:16]), (x[16:40], y[16:40])],
    "a pipeline of arrays": lambda x, y: lockstep.data.arrays(x, y).shuffle(3).map(lambda x, y: (x * 2, y)).batch(8),
    "a pipeline read ahead": lambda x, y: lockstep.data.arrays(x, y).shuffle(3).batch(8).prefetch(2),
    "examples by index": lambda x, y: lockstep.data.indexed(examples(x, y)),
    "examples in turn": lambda x, y: lockstep.data.stream(examples(x, y)),
    "gluon's data set": gluon.data.ArrayDataset,
    "gluon's loader": lambda x, y: gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), 16),
}


IN_BATCHES = {"a list of batches", "a pipeline of arrays", "a pipeline read ahead", "gluon's loader"}


def fitted(data, devices=2, batch_size=16, **options):
    with wrapped(net(), devices=devices) as trainer:
        trainer.fit(data, batch_size=batch_size, verbose=0, **options)
        return trainer.digest()


@pytest.mark.parametrize("source", SOURCES)
def test_fit(source, put):
    make, batch_size = SOURCES[source], None if source in IN_BATCHES else 16
    expected = fitted(make(X, LABELS), devices=1, batch_size=batch_size)
    assert fitted(make(put(X), put(LABELS)), batch_size=batch_size) == expected


def test_a_loader_gives_the_batches_of_its_arrays():
    """gluon's loader collates by itself; Lockstep's order without shuffling is the same."""
    assert fitted(SOURCES["gluon's loader"](X, LABELS), batch_size=None) == fitted((X, LABELS), shuffle=False)


def bits(outputs):
    return np.asarray(outputs).tobytes()


@pytest.mark.parametrize(
    "use",
    [
        lambda trainer, x, y: trainer.evaluate((x, y)),
        lambda trainer, x, y: bits(trainer.predict(x)),
        lambda trainer, x, y: bits(trainer(x).asnumpy()),
        lambda trainer, x, y: (dict(trainer.step((x, y))), trainer.digest()),
        lambda trainer, x, y: (dict(trainer.step((x, y, y))), trainer.digest()),  # weights, of which some are zero
    ],
    ids=["evaluate", "predict", "call", "step", "step with weights"],
)
def test_batches_without_fit(use, put):
    found = []
    for x, y in ((X, LABELS), (put(X), put(LABELS))):
        with wrapped(net(), devices=2, metrics=["accuracy"]) as trainer:
            found.append(use(trainer, x, y))
    assert found[0] == found[1]


def test_outputs_are_arrays_of_the_scripts_own_class(put):
    with wrapped(net(), devices=2) as trainer:
        assert type(trainer(X)) is type(put(X))
        assert trainer(X).ctx == mx.cpu(0)
        assert isinstance(trainer.predict(put(X)), np.ndarray)


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5, "float32")], ids=["a scalar", "an array of no axes"])
def test_a_number_goes_to_every_shard(number, put):
    @lockstep.objective
    def halved(block, batch):
        return block(batch["x"]).sum(axis=1) * batch["factor"]

    digests = set()
    for factor in (0.5, number):
        with wrapped(net(), criterion=halved, devices=2) as trainer:
            trainer.step({"x": X, "factor": factor})
            digests.add(trainer.digest())
    assert len(digests) == 1
