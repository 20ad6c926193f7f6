"""How a loss is taken: found out once, told in the opening line, and kept; and what a batch's third entry may be."""

import numpy as np
import pytest

import lockstep
from backends.kit import EXAMPLE_WEIGHTS, LABELS, VALUES, WEIGHTS, X
from backends.test_contract import KITS, kits
from lockstep.core.loss_reduction import Reduction
from lockstep.errors import BatchError

TOLD = ", loss: taken as the mean over examples"
BATCH = X[:24], VALUES[:24]


def form_of(kit, name):
    """The kit's form of that name; numpy's losses all say what they are."""
    found = [form for form in kit.forms if form.name == name]
    if not found:
        pytest.skip(f"{kit.module.__name__} has no {name!r}")
    return found[0]


def wrapped(kit, form, devices=1, shards=4, **options):
    model = form.model()
    return lockstep.wrap(model, kit.sgd(model, 0.01), form.loss, devices=devices, shards=shards, threads=1, **options)


@kits
def test_the_reading_does_not_depend_on_the_number_of_devices(kit):
    form = form_of(kit, "a function that is a sum")
    digests = set()
    for devices in (1, 3):
        with wrapped(kit, form, devices) as trainer:
            assert len(trainer.devices) == devices
            losses = [float(trainer.step(BATCH)["loss"]) for _ in range(2)]
            assert trainer.session.run.reduction is Reduction.SUM
            assert TOLD not in trainer.opening
            digests.add((*losses, trainer.digest()))
    assert len(digests) == 1


@kits
def test_shards_of_one_example_can_be_judged(kit):
    form = form_of(kit, "a function that is a sum")
    for count in (1, 3, 4):  # fewer than the shards
        with wrapped(kit, form) as trainer:
            loss, *_ = form.by_hand(form.model(), (X[:count], VALUES[:count]))
            assert trainer.step((X[:count], VALUES[:count]))["loss"] == pytest.approx(loss, rel=1e-12)
            assert trainer.session.run.reduction is Reduction.SUM


@kits
def test_a_loss_of_0_does_not_decide_the_reduction(kit):
    """Which a sum of hinges often is in the first shard, or in the first batches."""
    form = form_of(kit, "a function that is a sum")
    with wrapped(kit, form) as trainer:
        outputs = trainer.predict(X[:24])
        trainer.step((X[:24], outputs))
        assert trainer.session.run.reduction is None
        trainer.step((X[:24], np.concatenate([trainer.predict(X[:18]), VALUES[18:24]])))
        assert trainer.session.run.reduction is Reduction.SUM


@kits
def test_the_opening_line_of_fit_shows_the_checkpoint(kit, tmp_path):
    form = form_of(kit, "a function that is a sum")
    model = form.model()
    loss = form.loss

    def neither(*args):
        return loss(*args) + 1.0

    with lockstep.wrap(model, kit.sgd(model, 0.01), neither, devices=1, shards=4, threads=1) as trainer:
        trainer.fit(BATCH, batch_size=24, checkpoint=tmp_path, verbose=0)
        assert trainer.opening.endswith(TOLD)


@kits
def test_history_and_evaluation_tell_a_sum(kit):
    form = form_of(kit, "a function that is a sum")
    with wrapped(kit, form) as trainer:
        loss, *_ = form.by_hand(form.model(), BATCH)
        before = trainer.digest()
        assert trainer.evaluate(BATCH, batch_size=7)["loss"] == pytest.approx(loss, rel=1e-12)
        assert trainer.session.run.reduction is None  # an evaluation decides for itself alone
        assert trainer.digest() == before
        history = trainer.fit(BATCH, epochs=1, batch_size=24, validation_data=BATCH, verbose=0).history
        assert history["loss"][0] == pytest.approx(loss, rel=1e-12)
        assert history["val_loss"][0] == pytest.approx(trainer.evaluate(BATCH)["loss"], rel=1e-12)


@kits
def test_a_resumed_run_takes_the_loss_as_it_was_taken(kit, tmp_path):
    form = form_of(kit, "a function that is a sum")
    with wrapped(kit, form) as trainer:
        trainer.step(BATCH)
        trainer.save(tmp_path)
        trainer.step(BATCH)
        expected = trainer.digest()
    with wrapped(kit, form, devices=2) as trainer:
        trainer.restore(tmp_path)
        assert trainer.session.run.reduction is Reduction.SUM
        trainer.step(BATCH)
        assert trainer.digest() == expected


@kits
def test_a_loss_with_a_known_reduction_is_not_probed(kit):
    for name in ("cross entropy", "sum"):
        found = [form for form in kit.forms if form.name == name]
        for form in found:
            with wrapped(kit, form) as trainer:
                assert trainer.session.backend.criterion is None
                trainer.step(form.batch)
                assert trainer.session.run.reduction is None
                assert TOLD not in trainer.opening


@kits
@pytest.mark.parametrize("name", ["a lambda of one number", "a function"])
def test_a_function_that_is_a_mean_goes_without_a_word(kit, name):
    form = form_of(kit, name)
    with wrapped(kit, form) as trainer:
        trainer.step(form.batch)
        assert trainer.session.run.reduction in (Reduction.MEAN, None)
        assert TOLD not in trainer.opening


@kits
def test_an_objective_that_returns_no_sum_is_probed(kit):
    for name, told in (("objective", True), ("objective with values", True), ("objective of a Sum", False)):
        for form in (form for form in kit.forms if form.name == name):
            for shards in (1, 4):
                with wrapped(kit, form, shards=shards) as trainer:
                    trainer.step(form.batch)
                    trainer.step(form.batch)
                    assert trainer.opening.count(TOLD) == told


@kits
def test_a_batch_that_fails_decides_nothing(kit):
    form = form_of(kit, "a function that is a sum")
    with wrapped(kit, form) as trainer:
        with pytest.raises(Exception):  # noqa: B017, PT011 - each framework has its own
            trainer.step((X[:24, :3], VALUES[:24]))
        assert trainer.session.run.reduction is None
        trainer.step(BATCH)
        assert trainer.session.run.reduction is Reduction.SUM


SMALL = [pytest.param(kit, id=name) for name, kit in KITS.items() if name != "keras"]  # there they are sample weights


@pytest.mark.parametrize("kit", SMALL)
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("way", ["step", "evaluate", "fit", "pipeline"])
def test_an_integer_third_entry_is_refused(kit, dtype, way):
    model = kit.model(WEIGHTS)
    batch = X[:24], np.where(LABELS[:24] == 2, 3, LABELS[:24]), np.arange(24).astype(dtype)
    with lockstep.wrap(model, kit.sgd(model, 0.1), kit.cross_entropy(), devices=1, shards=4, threads=1) as trainer:
        before = trainer.digest()
        calls = {
            "step": lambda: trainer.step(batch),
            "evaluate": lambda: trainer.evaluate(batch),
            "fit": lambda: trainer.fit(iter([batch]), verbose=0),
            "pipeline": lambda: trainer.fit(lockstep.data.arrays(*batch).batch(8), verbose=0),
        }
        with pytest.raises(BatchError) as caught:
            calls[way]()
        for words in (
            "with a third entry of ",
            "((inputs, index), targets)",
            "((a, b), targets)",
            "If the third entry is example weights, give ",
        ):
            assert words in str(caught.value)
        assert trainer.digest() == before


@pytest.mark.parametrize("kit", SMALL)
def test_bools_and_floats_of_either_sign_are_weights(kit):
    targets = np.where(LABELS == 2, 3, LABELS)
    digests = []
    for weights in (EXAMPLE_WEIGHTS > 1, (EXAMPLE_WEIGHTS > 1).astype("float64"), 1.5 - EXAMPLE_WEIGHTS):
        model = kit.model(WEIGHTS)
        with lockstep.wrap(model, kit.sgd(model, 0.1), kit.cross_entropy(), devices=1, shards=4, threads=1) as trainer:
            trainer.step((X, targets, weights))
            digests.append(trainer.digest())
    assert digests[0] == digests[1] != digests[2]
