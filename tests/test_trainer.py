"""The trainer, on the reference backend: what a script sees, for any number of devices."""

import itertools

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense, DenseCrossEntropy
from lockstep.errors import BatchError, DivergedError, ExactError, NonFiniteError, PlanError, StateError

GENERATOR = np.random.Generator(np.random.PCG64(0))
X = GENERATOR.standard_normal((61, 6))
Y = GENERATOR.integers(0, 4, 61)


def wrapped(devices=1, **options):
    options = {"metrics": ["accuracy"], "shards": 4, **options}
    return lockstep.wrap(Dense([6, 9, 4], seed=1), SGD(0.1, momentum=0.9), "cross_entropy", devices=devices, **options)


@pytest.fixture(scope="module", params=[1, 2, 3])
def trainer(request):
    with wrapped(request.param) as trainer:
        assert len(trainer.devices) == request.param
        trainer.evaluate((X, Y), batch_size=61)  # opens what stays open between the tests
        yield trainer


# -- forward only


def test_evaluate_counts_every_example_once(trainer):
    for size in [*range(1, 2 * len(trainer.devices) + 2), 61]:
        x, y = X[:size], Y[:size]
        outputs = trainer.model(x)
        losses = np.log(np.exp(outputs).sum(1)) - outputs[np.arange(size), y]
        expected = {"loss": losses.mean(), "accuracy": (outputs.argmax(1) == y).mean()}
        for batch_size in (None, 2, size):
            assert trainer.evaluate((x, y), batch_size=batch_size) == pytest.approx(expected, rel=1e-12)


def test_predict_gives_every_row_in_order(trainer):
    for size in [*range(1, 2 * len(trainer.devices) + 2), 61]:
        for batch_size in (None, 2, size):
            found = trainer.predict(X[:size], batch_size=batch_size)
            assert found.shape == (size, 4)
            np.testing.assert_allclose(found, trainer.model(X[:size]), rtol=1e-12)


def test_a_call_gives_every_row_in_order(trainer):
    for size in range(1, 2 * len(trainer.devices) + 2):
        np.testing.assert_allclose(trainer(X[:size]), trainer.model(X[:size]), rtol=1e-12)


def test_predict_takes_the_inputs_of_a_loaders_batches(trainer):
    loader = [(X[:5], Y[:5]), [X[5:9], Y[5:9], Y[5:9]], X[9:12]]
    np.testing.assert_allclose(trainer.predict(loader), trainer.model(X[:12]), rtol=1e-12)


@pytest.mark.parametrize("size", [5, 9])
def test_predict_does_not_guess_what_a_list_of_arrays_is(trainer, size):
    message = (
        r"The list of arrays \(ndarray.*\) may be several inputs or several batches\. Use predict\(\(x1, x2\)\) for "
        r"several inputs, or "
    )
    parts = [X[:5], X[5 : 5 + size]]
    with pytest.raises(BatchError, match=message):
        trainer.predict(parts)
    expected = trainer.predict(X[: 5 + size])
    np.testing.assert_allclose(trainer.predict(iter(parts)), expected, rtol=1e-12)
    np.testing.assert_allclose(trainer.predict([X[: 5 + size]]), expected, rtol=1e-12)


def test_before_the_first_step_the_first_batch_decides_the_shards():
    """A short last batch alone would have fewer shards on one device than on three."""
    generator = np.random.default_rng(2)
    x, y = generator.standard_normal((261, 97)).astype("float32"), generator.integers(0, 10, 261)
    found = set()
    for devices in (1, 3):
        model = Dense([97, 64, 10], seed=1, dtype="float32")
        with lockstep.wrap(model, SGD(0.1), "cross_entropy", devices=devices) as trainer:
            assert len(trainer.devices) == devices
            found.add((trainer.evaluate((x, y), batch_size=256)["loss"], trainer.predict(x, batch_size=256).tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("use", ["evaluate", "predict"])
@pytest.mark.parametrize("data", [[], iter(())], ids=["list", "generator"])
def test_no_data(use, data):
    with wrapped() as trainer, pytest.raises(BatchError, match=r"^The data has no batch\."):
        getattr(trainer, use)(data)


# -- training


def test_a_step_tells_its_means_and_the_norm():
    with wrapped(shards=1) as trainer:
        before = {name: value.copy() for name, value in trainer.model.parameters.items()}
        expected = trainer.evaluate((X, Y), batch_size=61)
        logs = trainer.step((X, Y))
        assert dict(logs) == pytest.approx(expected)
        assert list(logs) == ["loss", "accuracy"]
        assert len(logs) == 2
        assert repr(logs) == repr(dict(logs))
        change = [(value - before[name]) / 0.1 for name, value in trainer.model.parameters.items()]
        assert logs["grad_norm"] == pytest.approx(np.sqrt(sum((each**2).sum() for each in change)))
        with pytest.raises(KeyError):
            logs["acuracy"]


def test_the_norm_can_be_read_until_the_next_step():
    with wrapped() as trainer:
        first = trainer.step((X, Y))
        trainer.step((X, Y))
        with pytest.raises(StateError, match=r"The gradient of step \d+ is no longer in memory"):
            first["grad_norm"]
        assert first["loss"] > 0


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_that_fails_has_overwritten_the_gradient_too(devices):
    with wrapped(devices=devices) as trainer:
        assert len(trainer.devices) == devices
        logs = trainer.step((X, Y))
        with pytest.raises(NonFiniteError):
            trainer.step((X * np.nan, Y))
        with pytest.raises(StateError, match=r"gradient of step 0 is no longer in memory, because"):
            logs["grad_norm"]


def test_fit_returns_the_history():
    with wrapped() as trainer:
        history = trainer.fit((X, Y), epochs=3, batch_size=16, validation_data=(X[:9], Y[:9]), verbose=0)
        assert isinstance(history, lockstep.History)
        assert history is trainer.history
        assert history.epoch == [0, 1, 2]
        assert history.devices == ("cpu:0",)
        assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
        assert {len(column) for column in history.history.values()} == {3}
        assert history.history["val_loss"][-1] == trainer.evaluate((X[:9], Y[:9]))["loss"]
        assert history.history["loss"][2] < history.history["loss"][0]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 2),  # batches of 32
        ({"batch_size": 16}, 4),
        ({"batch_size": 16, "epochs": 3}, 12),
        ({"batch_size": 16, "epochs": 3, "steps_per_epoch": 2}, 6),
        ({"batch_size": 1000}, 1),
    ],
)
def test_how_many_steps(options, steps):
    with wrapped() as trainer:
        trainer.fit((X, Y), verbose=0, **options)
        assert trainer.session.run.step == steps


def test_a_generator_goes_on_where_an_epoch_stopped():
    with wrapped() as trainer:
        batches = ((X[start : start + 10], Y[start : start + 10]) for start in range(0, 60, 10))
        history = trainer.fit(batches, epochs=3, steps_per_epoch=2, verbose=0)
        assert trainer.session.run.step == 6
        assert history.epoch == [0, 1, 2]


def test_a_generator_that_is_used_up():
    with wrapped() as trainer:
        batches = ((X, Y) for _ in range(2))
        with pytest.raises(BatchError, match="Epoch 2 has no batch, because a generator can be read only once"):
            trainer.fit(batches, epochs=2, verbose=0)


def test_fit_is_the_steps_it_is_made_of():
    with wrapped() as one, wrapped() as other:
        one.fit((X, Y), epochs=2, batch_size=16, verbose=0)
        for epoch in range(2):
            for batch in other.session.open_data((X, Y), 16, shuffle=True).epoch(epoch):
                other.step(batch)
        assert one.digest() == other.digest()


@pytest.mark.parametrize("stop", [None, 2])  # a callback that ends the first epoch early
def test_fitting_again_goes_on_with_the_next_epoch(stop):
    class Stop(lockstep.Callback):
        def on_train_batch_end(self, batch, logs):
            self.trainer.stop_training = batch == stop

    with wrapped() as one, wrapped() as other:
        one.fit((X, Y), epochs=1, batch_size=16, steps_per_epoch=stop and stop + 1, verbose=0)
        one.fit((X, Y), epochs=2, batch_size=16, verbose=0)
        other.fit((X, Y), epochs=1, batch_size=16, callbacks=[Stop()], verbose=0)
        for _ in range(2):
            other.fit((X, Y), epochs=1, batch_size=16, verbose=0)
        assert one.digest() == other.digest()
    if stop is None:
        with wrapped() as whole:
            whole.fit((X, Y), epochs=3, batch_size=16, verbose=0)
            assert whole.digest() == one.digest()


@pytest.mark.parametrize(
    ("change", "same"),
    [({}, True), ({"seed": 1}, False), ({"shards": 2}, False), ({"clip_norm": 0.1}, False), ({"threads": 2}, True)],
)
def test_what_is_part_of_the_experiment(change, same):
    with wrapped() as one, wrapped(**change) as other:
        for each in (one, other):
            each.fit((X, Y), batch_size=16, verbose=0)
        assert (one.digest() == other.digest()) == same


def test_a_callback_stops_the_run():
    class Stop(lockstep.Callback):
        def on_train_batch_end(self, batch, logs):
            self.trainer.stop_training = batch == 1

    with wrapped() as trainer:
        trainer.fit((X, Y), epochs=5, batch_size=16, callbacks=[Stop()], verbose=0)
        assert trainer.session.run.step == 2
        trainer.fit((X, Y), epochs=1, batch_size=16, verbose=0)
        assert trainer.session.run.step == 6


def test_shards_are_decided_at_the_first_batch_and_kept():
    with wrapped(shards=None) as trainer:
        trainer.step((X, Y))
        assert trainer.opening == "1 device (cpu:0), 1 shard of 61, batch 61, 1 thread per shard, seed 0"
        trainer.step((np.tile(X, (5, 1)), np.tile(Y, 5)))
        assert trainer.session.run.shards == 1


@pytest.mark.parametrize("loss", [DenseCrossEntropy(), "mse"])
def test_a_failed_step_was_not_made(loss):
    targets = X[:, :4] if loss == "mse" else Y
    with lockstep.wrap(Dense([6, 4], seed=0), SGD(0.1, 0.9), loss, devices=1, shards=4) as trainer:
        trainer.step((X, targets))
        before = trainer.digest()
        bad = X.copy()
        bad[20] = np.inf
        with np.errstate(invalid="ignore"), pytest.raises(NonFiniteError, match="in step 1, shard 1"):
            trainer.step((bad, targets))
        assert trainer.digest() == before


@pytest.mark.parametrize(
    ("devices", "shards", "message"),
    [(9, 8, "devices=9 needs at least 9 shards, got shards=8. Use shards=16, or devices=8.")],
)
def test_more_devices_than_shards(devices, shards, message):
    with pytest.raises(PlanError) as caught:
        wrapped(devices, shards=shards)
    assert str(caught.value) == message


# -- several processes


def test_verify_compares_every_step_and_leaves_the_state_as_it_was():
    with wrapped(2) as trainer:
        trainer.step((X, Y))
        before = trainer.digest()
        found = trainer.verify((X, Y), steps=2, devices=(1, 2, 3))
        assert found.equal
        assert list(found.digests) == [1, 2, 3]
        assert {len(set(digests)) for digests in found.digests.values()} == {2}
        assert trainer.digest() == before
        assert len(trainer.devices) == 2
        with wrapped(1) as alone:
            alone.step((X, Y))
            for each in (trainer, alone):
                each.step((X, Y))
            assert trainer.digest() == alone.digest()


def test_what_the_script_wrote_before_a_verification_reaches_every_replica_after_it():
    with wrapped(2) as trainer:
        trainer.step((X, Y))
        trainer.model.parameters["0.weight"][0, 0] += 1
        trainer.verify((X, Y), steps=1, devices=(1, 1))
        trainer.step((X, Y))
        trainer.digest()  # raises where replicas differ


def test_verify_names_the_step_and_the_array_that_differ(monkeypatch):
    with wrapped(1) as trainer:
        forward = Dense.forward
        calls = []

        def drifting(self, x, generator):
            calls.append(x)
            return forward(self, x + 1e-9 * (len(calls) > 8), generator)  # from the third step on

        monkeypatch.setattr(Dense, "forward", drifting)
        with pytest.raises(DivergedError) as caught:
            trainer.verify((X, Y), steps=1, devices=(1, 1, 1))
        assert str(caught.value).startswith("The bits depend on the number of devices. With 1 devices '")
        assert "differs from 1 after step 1." in str(caught.value)


@pytest.mark.parametrize("devices", [(), (2,)])
def test_verify_needs_two_runs_to_compare(devices):
    with wrapped(1) as trainer, pytest.raises(PlanError) as caught:
        trainer.verify((X, Y), devices=devices)
    assert (
        str(caught.value)
        == f"verify needs at least two numbers of devices to compare. Got devices={devices}. Use devices=(1, 2)."
    )


def test_verify_says_which_numbers_of_devices_it_did_not_try(monkeypatch):
    with wrapped(1) as trainer:
        draws = itertools.count()
        forward = Dense.forward
        monkeypatch.setattr(Dense, "forward", lambda self, x, rng: forward(self, x + 1e-3 * next(draws), rng))
        with pytest.raises(DivergedError, match=r"the clock\. Not tried: 2, 3 devices\.$"):
            trainer.verify((X, Y), steps=1, devices=(1, 1, 2, 3))


def test_verify_refuses_a_trainer_without_the_promise():
    with wrapped(exact=False) as trainer:
        assert trainer.digest().startswith("inexact:")
        with pytest.raises(ExactError) as caught:
            trainer.verify((X, Y))
        assert str(caught.value) == (
            "verify cannot be used with exact=False, because the bits may then differ. Use exact=True in lockstep.wrap."
        )


def test_closing_is_idempotent_and_a_later_use_starts_again():
    with wrapped(2) as trainer, wrapped(1) as alone:
        for each in (trainer, alone):
            each.step((X, Y))
        trainer.close()
        trainer.close()
        for each in (trainer, alone):
            each.step((X, Y))
        assert len(trainer.devices) == 2
        assert trainer.digest() == alone.digest()
    trainer.close()


def test_a_failure_in_a_worker_is_the_scripts_own_and_training_goes_on():
    with wrapped(3, shards=8) as trainer:
        trainer.step((X, Y))
        before = trainer.digest()
        bad = X.copy()
        bad[60] = np.nan  # the last shard, on the last device
        with pytest.raises(NonFiniteError, match="in step 1, shard 7"):
            trainer.step((bad, Y))
        assert trainer.digest() == before
        trainer.step((X, Y))
        assert trainer.digest() != before


def test_a_batch_of_size_0_is_refused():
    with (
        wrapped() as trainer,
        pytest.raises(BatchError, match="Got batch_size=0"),
    ):
        trainer.fit((X, Y), batch_size=0)
