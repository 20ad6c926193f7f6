"""The arguments of fit, evaluate and predict that people bring with them, on the reference backend."""

import inspect
import math

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.errors import ArgumentError, BatchError, ModelError

GENERATOR = np.random.Generator(np.random.PCG64(0))
X = GENERATOR.standard_normal((60, 6))
Y = GENERATOR.integers(0, 4, 60)
W = GENERATOR.random(60)


def wrapped(devices=1, **options):
    options = {"metrics": "accuracy", "shards": 2, **options}
    return lockstep.wrap(Dense([6, 9, 4], seed=1), SGD(0.1, momentum=0.9), "cross_entropy", devices=devices, **options)


def run(*data, devices=1, **options):
    """The digest and the history of a run."""
    with wrapped(devices) as trainer:
        history = trainer.fit(*data, **{"batch_size": 20, "epochs": 3, "verbose": 0, **options})
        return trainer.digest(), history.history


@pytest.mark.parametrize(
    ("data", "options", "whole"),
    [
        ((X, Y), {}, (X, Y)),
        ((), {"x": X, "y": Y}, (X, Y)),
        ((X, Y), {"sample_weight": W}, (X, Y, W)),
        (((X, Y),), {"sample_weight": list(W)}, (X, Y, W)),
        ((X, Y), {"sample_weight": np.arange(60)}, (X, Y, np.arange(60).astype("float32"))),
        ((X.tolist(), Y.tolist()), {}, (X.tolist(), Y.tolist())),
    ],
    ids=["x, y", "by name", "weights", "weights beside a tuple", "integer weights are no index", "lists"],
)
def test_data_given_apart_is_the_data_given_as_one(data, options, whole):
    assert run(*data, **options) == run(whole)


@pytest.mark.parametrize("devices", [1, 2])
def test_validation_split_holds_out_the_last_part_before_shuffling(devices):
    # 60 * (1 - 0.3) is 42.0 less a rounding: Keras takes 42 as well
    split = run(X, Y, sample_weight=W, validation_split=0.25, devices=devices)
    assert split == run((X[:45], Y[:45], W[:45]), validation_data=(X[45:], Y[45:], W[45:]))


def test_initial_epoch_goes_on_as_one_fit():
    whole, history = run(X, Y, epochs=5)
    with wrapped() as trainer:
        trainer.fit(X, Y, batch_size=20, epochs=2, verbose=0)
        later = trainer.fit(X, Y, batch_size=20, epochs=5, initial_epoch=2, verbose=0)
        assert later.epoch == [2, 3, 4]
        assert later["loss"] == history["loss"][2:]
        assert trainer.digest() == whole
        assert trainer.fit(X, Y, epochs=2, initial_epoch=5, verbose=0).epoch == []


@pytest.mark.parametrize(
    ("freq", "validated"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2]), (9, []), ([1, 4], [0, 3]), (range(2, 4), [1, 2])]
)
def test_validation_freq(freq, validated):
    with wrapped() as trainer:
        history = trainer.fit(X, Y, batch_size=20, epochs=4, validation_split=0.5, validation_freq=freq, verbose=0)
        assert len(history["loss"]) == 4
        values = history.history.get("val_loss", [math.nan] * 4)
        assert [epoch for epoch, value in enumerate(values) if not math.isnan(value)] == validated


def test_callbacks_wait_for_the_next_validation(tmp_path):
    stopping = lockstep.EarlyStopping(patience=1, min_delta=100.0)
    plateau = lockstep.ReduceLROnPlateau(patience=1, min_delta=100.0, cooldown=9)
    options = {"validation_split": 0.5, "validation_freq": 2, "verbose": 0, "epochs": 9}
    with wrapped() as trainer:
        best = lockstep.Checkpoint(tmp_path, best="val_loss")
        history = trainer.fit(X, Y, callbacks=[stopping, plateau], checkpoint=best, **options)
        assert history.epoch == [0, 1, 2, 3]  # validated after 1 and 3
        assert trainer.learning_rates == (pytest.approx(0.01),)
        with pytest.raises(ModelError, match="'lss' is not among the metrics of this run: 'loss', 'accuracy'"):
            trainer.fit(X, Y, callbacks=[lockstep.EarlyStopping("lss", mode="min")], **options)
    assert (tmp_path / "best").is_symlink()


def test_validation_steps_and_batch_size():
    seen = []

    def batches():
        for start in range(0, 60, 10):
            seen.append(start)
            yield X[start : start + 10], Y[start : start + 10]

    class Loader:
        def __iter__(self):
            return batches()

    with wrapped() as trainer:
        history = trainer.fit(X, Y, epochs=2, validation_data=Loader(), validation_steps=2, verbose=0)
        assert seen == [0, 10, 0, 10]
        assert history["val_loss"][-1] == trainer.evaluate(X[:20], Y[:20], batch_size=10)["loss"]
        endless = lockstep.data.arrays(X, Y).repeat().batch(10)
        trainer.fit(X, Y, validation_data=endless, validation_steps=2, verbose=0)
        assert trainer.history["val_loss"] == [trainer.evaluate(endless, steps=2)["loss"]]
        assert trainer.predict(endless, steps=3).shape == (30, 4)
        trainer.fit(X, Y, validation_data=(X, Y), validation_batch_size=60, verbose=0)
        assert trainer.history["val_loss"] == [trainer.evaluate(X, Y, batch_size=60)["loss"]]
        with pytest.raises(
            BatchError,
            match=r"This data is infinite. Give .* e.g. steps=100",
        ):
            trainer.evaluate(endless)


def test_a_class_that_is_left_out_weighs_1():
    weights = np.where(Y == 2, 3.0, 1.0)
    assert run(X, Y, class_weight={2: 3.0}) == run((X, Y, weights))


def test_evaluate_prints_a_line_if_asked_to(capsys):
    with wrapped() as trainer:
        trainer.evaluate(X, Y)
        trainer.predict(X)
        assert capsys.readouterr().out == ""
        values = trainer.evaluate(X, Y, sample_weight=W, verbose=1)
        assert values == trainer.evaluate((X, Y, W))
        shown = capsys.readouterr().out
        assert shown.startswith(f"loss {values['loss']:.3f}  accuracy {values['accuracy']:.4f}  2 batches  ")
        trainer.predict(X, verbose=2)
        assert capsys.readouterr().out.startswith("2 batches  ")


# -- what is wrong


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.fit((X, Y), epoch=3), r"fit\(\) has no keyword 'epoch'. Did you mean epochs=\?"),
        (lambda t: t.fit((X, Y), batchsize=3), r"fit\(\) has no keyword 'batchsize'. Did you mean batch_size=\?"),
        (lambda t: t.fit((X, Y), val_data=3), r"fit\(\) has no keyword 'val_data'. Did you mean validation_data=\?"),
        (
            lambda t: t.fit((X, Y), workers=3),
            r"fit\(\) has no keyword 'workers'. Use .prefetch",
        ),
        (lambda t: t.fit((X, Y), zzz=3), r"fit\(\) has no keyword 'zzz'. Use one of x, y, epochs, batch_size, "),
        (lambda t: t.fit(X, Y, 32, 5), r"fit\(\) takes at most 2 positional arguments: x, y. Got 4. Give the oth"),
        (lambda t: t.fit(epochs=5), r"fit\(\) needs the argument x. Its arguments are x, y, "),
        (lambda t: t.evaluate(X, Y, callbacks=[]), r"evaluate\(\) has no keyword 'callbacks'. Use fit"),
        (lambda t: t.predict(X, Y), r"predict\(\) takes at most 1 positional argument: x. Got 2"),
        (lambda t: t.step(X, Y), r"step\(\) takes at most 1 positional argument: batch. .*step\(\(x, y\)\)"),
        (lambda t: t.step((X, Y), verbos=0), r"step\(\) has no keyword 'verbos'. Did you mean verbose=\?"),
        (lambda t: wrapped(metric=["accuracy"]), r"wrap\(\) has no keyword 'metric'. Did you mean metrics=\?"),
        (lambda t: wrapped(strategy="ddp"), r"wrap\(\) has no keyword 'strategy'. Leave strategy out"),
        (
            lambda t: t.fit(X, Y, validation_split=1.0),
            r"must be 0 or more and below 1. Got 1.0. Use for example validation_split=0.1",
        ),
        (lambda t: t.fit(X, Y, validation_freq=0), r"validation_freq must be the number of epochs .*Got 0"),
        (
            lambda t: t.fit(X, Y, validation_freq=[0, "a"]),
            r"validation_freq must be the number of epochs .*Got \[0, 'a'\]",
        ),
        (lambda t: t.fit(X, Y, validation_steps=1.5), r"validation_steps must be an integer, 1 or more. Got .*=1.5"),
        (lambda t: t.fit(X, Y, initial_epoch="a"), r"initial_epoch must be an integer, 0 or more"),
        (
            lambda t: t.fit(X, Y, validation_split=0.5, validation_data=(X, Y)),
            r"validation_data= and validation_split= cannot be",
        ),
        (
            lambda t: t.fit(X, Y, initial_epoch=1, checkpoint="c"),
            r"a resumed run continues at the epoch in its checkpoint",
        ),
    ],
)
def test_wrong_arguments_say_the_right_ones(call, message):
    with wrapped() as trainer:
        with pytest.raises(ArgumentError, match=message):
            call(trainer)
        assert trainer.num_steps == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.fit([(X, Y)], validation_split=0.5), "validation_split=0.5 cannot be used with a list"),
        (lambda t: t.fit(X[:2], Y[:2], validation_split=0.9), "validation_split=0.9 of 2 examples leaves 0 examples"),
        (
            lambda t: t.fit(iter([(X, Y)]), iter([(X, Y)])),
            r"fit\(list_iterator, list_iterator\) is not supported, .* Use fit\(data\), or f",
        ),
        (lambda t: t.evaluate(iter([(X, Y)]), Y), r"evaluate\(list_iterator, ndarray\) is .* Use evaluate\(data\)\."),
        (lambda t: t.fit(X, sample_weight=W), r"sample_weight can only be used with inputs and targets"),
        (lambda t: t.fit(X, Y[:5]), r"different lengths, 60, 5, in"),
        (
            lambda t: t.fit(X, Y, batch_size=20, steps_per_epoch=4),
            "steps_per_epoch=4 is more than the 3 batches",
        ),
        (
            lambda t: t.fit(lockstep.data.arrays(X, Y).repeat()),
            r"needs steps_per_epoch because this data is infinite\. Use for example steps_per_epoch=100",
        ),
    ],
)
def test_data_that_cannot_be_given_so(call, message):
    with wrapped() as trainer:
        with pytest.raises(BatchError, match=message):
            call(trainer)
        assert trainer.num_steps == 0


# -- the trainer itself


def test_what_a_trainer_says_of_itself():
    with wrapped(2, shards=None, seed=3) as trainer:
        assert trainer.shards is None
        assert repr(trainer) == (
            "<Trainer of Dense: 2 devices (cpu:0, cpu:1), shards chosen at the first batch, seed 3, step 0>"
        )
        trainer.fit(X, Y, batch_size=60, verbose=0)
        assert trainer.shards == 2
        assert "2 shards, seed 3, step 1>" in repr(trainer)
        assert isinstance(trainer.optimizer, SGD)
    with wrapped(exact=False) as inexact:
        assert repr(inexact).endswith("step 0, exact=False>")


def test_the_public_names_are_what_dir_shows():
    assert set(dir(lockstep)) == {*lockstep.__all__, "__version__"}
    assert all(hasattr(lockstep, name) for name in lockstep.__all__)


def test_the_signature_of_fit_is_there_for_editors():
    names = list(inspect.signature(lockstep.Trainer.fit).parameters)
    assert names[:3] == ["self", "x", "y"]
    assert not {"extra", "others", "args", "kwargs"}.intersection(names)
