"""Losses, labels, metrics and sums mean the same in every framework. LOCKSTEP_BACKENDS chooses the frameworks."""

import numpy as np
import pytest

import lockstep
from backends.kit import CLASSES, LABELS, NUM_EXAMPLES, WEIGHTS, X
from backends.test_contract import KITS, kits
from lockstep.core.shard_sums import CUSTOM_SUMS
from lockstep.errors import BatchError, ModelError


def wrapped(kit, model, loss, **options):
    return lockstep.wrap(model, kit.sgd(model, 0.1), loss, devices=1, threads=1, **{"shards": 8, **options})


def with_form(name):
    """The frameworks whose kit has such a form, with it."""
    found = [(key, kit, form) for key, kit in KITS.items() for form in kit.forms if form.name == name]
    return pytest.mark.parametrize(("kit", "form"), [pytest.param(kit, form, id=key) for key, kit, form in found])


def is_refused(trainer, batch, error, message):
    """Whether neither a step nor an evaluation takes the batch, and both leave everything as it was."""
    before = trainer.digest()
    for call in (trainer.step, trainer.evaluate):
        with pytest.raises(error, match=message):
            call(batch)
    return trainer.digest() == before and trainer.num_steps == 0


@kits
@pytest.mark.parametrize("shards", [8, 1])
@pytest.mark.parametrize("label", [CLASSES, -1])
def test_labels_outside_the_classes_are_refused(kit, shards, label):
    wrong = np.where(np.arange(NUM_EXAMPLES) == 40, label, LABELS)
    message = (
        rf"Labels must be from 0 to 7\. Got {label}\. Fix the labels, or give the model's last layer more outputs\."
    )
    with wrapped(kit, kit.model(WEIGHTS), kit.cross_entropy(), shards=shards) as trainer:
        assert is_refused(trainer, (X, wrong), BatchError, message)
        trainer.step((X, LABELS))
        with pytest.raises(BatchError, match=message):
            trainer.step((X, wrong))
        assert trainer.num_steps == 1


@with_form("objective of examples")
def test_metrics_have_the_same_names_in_every_shard(kit, form):
    @lockstep.objective
    def objective(model, batch):
        losses = form.loss(model, batch)
        return losses, {"even" if batch["x"].shape[0] % 2 else "odd": losses}

    message = r"^An objective must return the same metrics for every shard\. Got .* in one shard and .* in another\."
    with wrapped(kit, form.model(), objective) as trainer:  # shards of 8 and of 7
        assert is_refused(trainer, form.batch, ModelError, message)


@with_form("an output with a loss")
def test_metrics_of_a_models_own_loss_need_labels_by_name(kit, form):
    by_position = form.batch["x"], form.batch["labels"]
    message = "The metric 'accuracy' compares outputs with targets, but this loss gives Lockstep neither"
    with wrapped(kit, form.model(), None, metrics=["accuracy"]) as trainer:
        assert is_refused(trainer, by_position, ModelError, message)


@with_form("a dict with a loss alone")
def test_metrics_get_the_whole_output_of_a_model_without_logits(kit, form):
    model = form.model()
    with wrapped(kit, model, None, metrics={"loss again": lambda out, y: out["loss"]}) as trainer:
        logs = trainer.step(form.batch)
        assert logs["loss again"] == pytest.approx(logs["loss"], rel=1e-12)


@pytest.mark.parametrize(
    "kit", [pytest.param(kit, id=name) for name, kit in KITS.items() if not getattr(kit, "own_metrics", False)]
)
def test_metrics_have_no_more_sums_than_there_is_room_for(kit):
    metric = lockstep.Metric(lambda outputs, targets: [0.0] * (CUSTOM_SUMS + 1), lambda sums: 0.0, "many")
    with wrapped(kit, kit.model(WEIGHTS), kit.cross_entropy(), shards=2, metrics=[metric, "accuracy"]) as trainer:
        before = trainer.digest()
        with pytest.raises(
            ModelError,
            match=r"The metrics of a step can have at most 1026 sums\. Got 1027\. Return fewer sums, or divide",
        ):
            trainer.step((X, LABELS))
        assert trainer.digest() == before


@pytest.mark.parametrize(
    "kit", [pytest.param(kit, id=name) for name, kit in KITS.items() if not getattr(kit, "own_metrics", False)]
)
def test_vectors_in_a_metrics_pair_are_refused(kit):
    """They would move every later metric in the vector of sums."""

    def pair(outputs, targets):
        return np.ones(3), np.ones(3)

    listed = lockstep.Metric(lambda outputs, targets: [np.ones(2), 1.0], lambda sums: sums[0], "listed")
    for metric in (lockstep.Metric(pair, name="pair"), listed):
        with (
            wrapped(kit, kit.model(WEIGHTS), kit.cross_entropy(), shards=2, metrics=[metric, "accuracy"]) as trainer,
            pytest.raises(ModelError, match=r"one number for each entry\. .* returned an entry of shape \([23],\)\."),
        ):
            trainer.step((X, LABELS))


@pytest.mark.parametrize(
    "kit", [pytest.param(kit, id=name) for name, kit in KITS.items() if not getattr(kit, "own_metrics", False)]
)
def test_a_metric_may_give_its_sums_as_one_vector(kit):
    metric = lockstep.Metric(lambda outputs, targets: np.arange(4.0), lambda sums: sums[3], "last")
    with wrapped(kit, kit.model(WEIGHTS), kit.cross_entropy(), shards=2, metrics=[metric]) as trainer:
        assert trainer.step((X, LABELS))["last"] == 6.0
