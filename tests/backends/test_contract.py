"""The contract: what every backend must do, in one suite that knows no framework.

Equal bits are not yet right bits, so everything is also compared with plain code
of the framework, in float64, to 1e-12. LOCKSTEP_BACKENDS chooses the frameworks;
one that was asked for and cannot be imported fails.
"""

import importlib
import itertools
import os
import re
from dataclasses import replace
from functools import cache

import cloudpickle
import numpy as np
import pytest

import lockstep
from backends.kit import EXAMPLE_WEIGHTS, GAPPED, IGNORED, LABELS, NUM_EXAMPLES, SIGNS, WEIGHTS, X
from backends.oracle import rename
from lockstep.backends.base import Recipe
from lockstep.core import batches, digest, plan, tree
from lockstep.core.fold import Fold
from lockstep.core.layout import ALIGNMENT
from lockstep.core.metrics import FIRST_METRIC
from lockstep.core.options import Options
from lockstep.core.types import Work
from lockstep.errors import ModelError, NonFiniteError, StateError
from lockstep.exchange.in_process import InProcessExchange
from lockstep.training.step import Member
from metric_object_samples import Order

TOLERANCE = 1e-12
KITS = {
    name: importlib.import_module(f"backends.kits.{name}")
    for name in os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")
}

BATCH = (X, GAPPED)
SIGNED = (X, np.where(LABELS == IGNORED, 3, LABELS), SIGNS)
OTHER = {name: value + 1 for name, value in WEIGHTS.items()}

kits = pytest.mark.parametrize("kit", [pytest.param(kit, id=name) for name, kit in KITS.items()])


def drives_all(kit):
    """Whether one backend holds the replicas of all devices; else each has a process of its own."""
    return len(kit.module.processes(["cpu:0", "cpu:1"])) == 1


def near(found, expected):
    """Whether numbers or arrays by name agree to the tolerance."""
    assert set(found.keys()) >= expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def cuts(few):
    """(kit, form, examples, shards); a framework that compiles every shape sees every cut in its first form alone."""
    return [
        pytest.param(kit, form, *cut, id="-".join(map(str, (name, form.name, *cut))))
        for name, kit in KITS.items()
        for form in kit.forms
        for cut in itertools.product((NUM_EXAMPLES, few), (8, 1))
        if not kit.compiles or form is kit.forms[0] or cut == (NUM_EXAMPLES, 8)
    ]


# -- right bits


@pytest.mark.parametrize(("kit", "form", "num_examples", "num_shards"), cuts(5))  # uneven shards, empty shards
def test_a_step_is_the_one_written_by_hand(kit, form, num_examples, num_shards):
    batch = batches.select(form.batch, slice(-num_examples, None))
    loss, gradient, metrics = form.by_hand(form.model(), batch)
    model = form.model()
    before = kit.weights(model)
    with lockstep.wrap(
        model, kit.sgd(model, 1.0), form.loss, metrics=form.metrics, devices=1, shards=num_shards, threads=1
    ) as trainer:
        logs = trainer.step(batch)
        after = kit.weights(model)
        near(logs, {"loss": loss, **metrics})
        near({name: before[name] - after[name] for name in before}, gradient)
        norm = sum(float((value**2).sum()) for value in gradient.values()) ** 0.5
        assert logs["grad_norm"] == pytest.approx(norm, abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.parametrize(("kit", "form", "batch_size", "num_shards"), cuts(7))
def test_an_evaluation_is_the_one_written_by_hand(kit, form, batch_size, num_shards):
    loss, _, metrics = form.by_hand(form.model(), form.batch)
    model = form.model()
    with lockstep.wrap(
        model, kit.sgd(model, 1.0), form.loss, metrics=form.metrics, devices=1, shards=num_shards, threads=1
    ) as trainer:
        before = trainer.digest()
        near(trainer.evaluate(form.batch, batch_size=batch_size), {"loss": loss, **metrics})
        assert trainer.digest() == before


COMMON = [
    pytest.param(kit, form, oracle, id=f"{name}-{form.name}")
    for name, kit in KITS.items()
    for form in kit.forms
    for oracle in KITS["numpy"].forms
    if name != "numpy" and oracle.name == form.name
]


@pytest.mark.parametrize(("kit", "form", "oracle"), COMMON)
def test_the_plain_code_has_the_gradient_of_numpy(kit, form, oracle):
    """So has the step, which is compared with the plain code above."""
    loss, gradient, _ = form.by_hand(form.model(), form.batch)
    expected, gradients, _ = oracle.by_hand(oracle.model(), oracle.batch)
    assert loss == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    near(gradient, rename(gradients, gradient))


@pytest.mark.parametrize(
    ("kit", "form", "oracle"),
    [case for case in COMMON if not case.values[0].compiles or case.values[1] is case.values[0].forms[0]],
)
def test_a_step_is_the_one_of_numpy(kit, form, oracle):
    outputs = []
    for each, made in ((kit, form), (KITS["numpy"], oracle)):
        model = made.model()
        with lockstep.wrap(model, each.sgd(model, 1.0), made.loss, devices=1, shards=8, threads=1) as trainer:
            trainer.step(made.batch)
            outputs.append(trainer.predict(X))
    np.testing.assert_allclose(*outputs, rtol=TOLERANCE, atol=TOLERANCE)


@kits
@pytest.mark.parametrize("num_shards", [8, 1])
def test_a_batch_without_weight_is_refused_and_changes_nothing(kit, num_shards):
    model = kit.model(WEIGHTS)
    optimizer = kit.sgd(model, 1.0, 0.9)
    with lockstep.wrap(model, optimizer, kit.cross_entropy(), devices=1, shards=num_shards, threads=1) as trainer:
        before = trainer.digest()
        for batch in (
            (X, np.full_like(LABELS, IGNORED)),
            (X, LABELS, np.zeros_like(EXAMPLE_WEIGHTS)),
            batches.select(SIGNED, slice(-1)),  # weights that cancel
        ):
            with pytest.raises(NonFiniteError):
                trainer.step(batch)
            assert trainer.digest() == before


@kits
def test_weights_of_both_signs_may_cancel_in_a_shard(kit):
    """What a shard weighs is their sum; whether it has a gradient is another question."""
    start, stop = plan.bounds(NUM_EXAMPLES, 8)[0]
    assert not SIGNS[start:stop].sum()
    assert SIGNS.sum() == 1
    found = []
    for num_shards in (8, 1):
        model = kit.model(WEIGHTS)
        loss = kit.cross_entropy()
        with lockstep.wrap(model, kit.sgd(model, 1.0), loss, devices=1, shards=num_shards, threads=1) as trainer:
            evaluated = trainer.evaluate(SIGNED, batch_size=NUM_EXAMPLES)["loss"]
            found.append({"evaluated": evaluated, "loss": trainer.step(SIGNED)["loss"], **kit.weights(model)})
    near(*found)


@pytest.mark.parametrize(
    ("kit", "form"),
    [
        pytest.param(kit, form, id=name)
        for name, kit in KITS.items()
        for form in kit.forms
        if form.name == "class weights"
    ],
)
def test_class_weights_are_one_for_each_class(kit, form):
    wider = {name: np.concatenate([value, value], -1) if name[0] == "1" else value for name, value in WEIGHTS.items()}
    model = kit.model(wider)
    with (
        lockstep.wrap(model, kit.sgd(model, 1.0), form.loss, devices=1, shards=8, threads=1) as trainer,
        pytest.raises(
            ModelError, match=r"Class weights need one entry per class. Got 8 weights for 16 classes. Give one"
        ),
    ):
        trainer.step(form.batch)


@kits
def test_a_loss_that_is_not_finite_names_its_shard_and_changes_nothing(kit):
    x = X.copy()
    x[20] = np.nan
    model = kit.model(WEIGHTS)
    with lockstep.wrap(model, kit.sgd(model, 0.1, 0.9), kit.cross_entropy(), devices=1, shards=8, threads=1) as trainer:
        before = trainer.digest()
        with pytest.raises(NonFiniteError, match=r"^The loss is nan in step 0, shard 2\."):
            trainer.step((x, LABELS))
        assert trainer.digest() == before


@kits
def test_clip_norm_scales_the_gradient_of_the_batch(kit):
    changes = []
    for clip_norm in (None, 0.05):
        model = kit.model(WEIGHTS)
        before = kit.weights(model)
        with lockstep.wrap(
            model, kit.sgd(model, 1.0), kit.cross_entropy(), devices=1, shards=8, threads=1, clip_norm=clip_norm
        ) as trainer:
            norm = trainer.step((X, LABELS))["grad_norm"]
            after = kit.weights(model)
        changes.append({name: before[name] - after[name] for name in before})
    assert norm > 0.05
    plain, clipped = changes
    for name, value in plain.items():  # not to the last digit: MXNet's own function rounds the factor to float32
        np.testing.assert_allclose(clipped[name], value * (0.05 / (norm + 1e-6)), rtol=1e-6)


@pytest.mark.parametrize("kit", [pytest.param(kit, id=name) for name, kit in KITS.items() if hasattr(kit, "short")])
def test_a_loss_in_a_short_type_keeps_its_share(kit):
    """Of bfloat16, 8 of 61 examples would be 0.1309 of the batch."""
    model = kit.model({name: np.ones([1] * value.ndim) * (value.ndim - 1) for name, value in WEIGHTS.items()})
    before = kit.weights(model)
    with lockstep.wrap(model, kit.sgd(model, 1.0), kit.short, devices=1, shards=8, threads=1) as trainer:
        assert trainer.step((np.ones((NUM_EXAMPLES, 1)), np.zeros(NUM_EXAMPLES)))["loss"] == 1
        after = kit.weights(model)
    near({name: before[name] - after[name] for name in before}, {name: np.ones_like(before[name]) for name in before})


# -- the seam


def opened(kit, weights=WEIGHTS, dropout=0.0, metrics=()):
    """A backend with one replica, outside any trainer."""
    model = kit.model(weights, dropout)
    recipe = Recipe(model, kit.sgd(model, 0.1, 0.9), kit.cross_entropy(), metrics, Options())
    return recipe, kit.module.open(recipe, ["cpu:0"])


def work(batch=BATCH, num_shards=8, *, step=0, seed=0):
    (pieces,) = batches.deal(batch, plan.Plan.even(num_shards, range(1)), [[0]])
    return Work(pieces, batches.count(batch), num_shards, 1, seed, step)


def add_up(backend, work):
    """The partial sums of a work, and its vectors of sums, both read."""
    layout = backend.layout()
    with backend.computing(work):
        num_replicas = len(work.pieces)
        buffers = cache(lambda replica, slot: backend.create_buffer(layout, None))
        fold = Fold(
            plan.Plan.even(work.num_shards, range(num_replicas)),
            work.pieces,
            lambda replica, slot, shard: buffers(replica, slot),
            backend.add,
        )
        partial_sums, shard_sums = backend.partial_sums(work, fold)
        return partial_sums, shard_sums.read()


def leaves(backend, work):
    """The leaf of every shard, each computed as the only shard of a process, and their vectors of sums."""
    found, vectors = {}, {}
    for shard, piece in work.shards.items():
        pieces = {replica: {} for replica in work.pieces} | {0: {shard: piece}}
        partial_sums, sums = add_up(backend, replace(work, pieces=pieces))
        (leaf,) = partial_sums.values()
        found[shard], vectors[shard] = arrays(backend, leaf), sums[shard]
    return found, vectors


def fields(backend, node):
    """The arrays of a partial sum by name, in numpy."""
    vectors = arrays(backend, node)
    return {
        field.name: vectors[field.dtype][field.offset : field.offset + field.size].reshape(field.shape)
        for field in backend.layout().fields
    }


def arrays(backend, node):
    """A copy of a partial sum's vectors in numpy."""
    return {dtype: np.array(backend.host(vector)) for dtype, vector in node.items()}


def contents(backend, node):
    return {dtype: vector.tobytes() for dtype, vector in arrays(backend, node).items()}


def step(backend, work):
    """One step in one process."""
    Member(backend, lambda plan: InProcessExchange(backend), [0]).step(work, plan.Plan.even(work.num_shards, range(1)))


def digests(backend):
    return digest.hash_arrays(backend.state())


def filled(backend, seed, change=lambda values: values * 1000):
    """A partial sum of random numbers, written through the memory that it was given."""
    layout = backend.layout()
    memory = bytearray(layout.nbytes)
    node = backend.create_buffer(layout, memoryview(memory))
    generator = np.random.Generator(np.random.PCG64(seed))
    for dtype, length in layout.lengths.items():
        values = change(generator.standard_normal(length)).astype(dtype)
        np.frombuffer(memory, dtype, length, layout.starts[dtype])[:] = values
    return node


@kits
def test_the_layout_is_aligned_and_has_room_for_the_sums(kit):
    recipe, backend = opened(kit)
    layout = backend.layout()
    assert layout.num_sums >= FIRST_METRIC
    itemsizes = {dtype: np.dtype(dtype).itemsize for dtype in layout.lengths}
    assert all(field.offset * itemsizes[field.dtype] % ALIGNMENT == 0 for field in layout.fields)
    trained = [field for field in layout.fields if field.offset < layout.divided.get(field.dtype, 0)]
    assert sorted(field.size for field in trained) == sorted(value.size for value in kit.weights(recipe.model).values())
    assert backend.layout() is layout


@kits
@pytest.mark.parametrize("num_examples", [NUM_EXAMPLES, 5])
def test_every_shard_with_examples_has_sums(kit, num_examples):
    _, backend = opened(kit)
    task = work(batches.select(BATCH, slice(num_examples)))
    partial_sums, vectors = add_up(backend, task)
    assert sorted(vectors) == sorted(task.shards) == list(range(min(8, num_examples)))
    assert {vector.shape for vector in vectors.values()} == {(backend.layout().num_sums,)}
    assert {vector.dtype for vector in vectors.values()} == {np.dtype("float64")}
    assert {shard for span in partial_sums for shard in range(*span)} >= set(task.shards)


@kits
def test_partial_sums_add_the_leaves_in_tree_order(kit):
    """Whoever computes a shard, and whatever it computed before."""
    names = ["cpu:0", "cpu:1"] if drives_all(kit) else ["cpu:0"]
    model = kit.model(WEIGHTS, dropout=0.3)
    backend = kit.module.open(Recipe(model, kit.sgd(model, 0.1), kit.cross_entropy(), (), Options()), names)
    (pieces,) = batches.deal(BATCH, plan.Plan.even(8, range(len(names))), [list(range(len(names)))])
    task = Work(pieces, NUM_EXAMPLES, 8, 1, 0, 0)
    partial_sums, vectors = add_up(backend, task)
    held = {span: arrays(backend, value) for span, value in partial_sums.items()}
    found, expected = leaves(backend, task)

    def add(left, right):
        return {dtype: left[dtype] + right[dtype] for dtype in left}

    total = tree.total(tree.root(8), held, add)
    assert contents(backend, total) == contents(backend, tree.fold([found[shard] for shard in range(8)], add))
    assert {shard: vector.tobytes() for shard, vector in vectors.items()} == {
        shard: vector.tobytes() for shard, vector in expected.items()
    }


@kits
def test_computing_partial_sums_does_not_change_the_state(kit):
    _, backend = opened(kit)
    before = digests(backend)
    add_up(backend, work())
    assert digests(backend) == before
    assert not backend.touched()


@kits
def test_a_shard_without_weight_gives_exact_zeros(kit):
    _, backend = opened(kit)
    found, vectors = leaves(backend, work())
    assert (GAPPED[:8] == IGNORED).all()
    assert all(not values.any() for values in fields(backend, found[0]).values())
    assert vectors[0][:2].tolist() == [0.0, 0.0]


@kits
def test_a_leaf_may_be_read_where_the_exchange_put_it(kit):
    _, backend = opened(kit)
    layout = backend.layout()
    memory = bytearray(layout.nbytes)
    task = work(num_shards=2)
    task = replace(task, pieces={0: {0: task.shards[0]}})
    with backend.computing(task):
        buffer = backend.create_buffer(layout, memoryview(memory))
        fold = Fold(plan.Plan.even(2, range(2)), task.pieces, lambda replica, slot, shard: buffer, backend.add)
        (leaf,) = backend.partial_sums(task, fold)[0].values()
    for dtype, length in layout.lengths.items():
        assert np.frombuffer(memory, dtype, length, layout.starts[dtype]).tobytes() == contents(backend, leaf)[dtype]


@kits
def test_add(kit):
    _, backend = opened(kit)
    left, right = filled(backend, 1), filled(backend, 2)
    before = contents(backend, left), contents(backend, right)
    one, other = arrays(backend, left), arrays(backend, right)
    expected = {dtype: (one[dtype] + other[dtype]).tobytes() for dtype in one}
    assert contents(backend, backend.add(left, right, None)) == expected
    assert (contents(backend, left), contents(backend, right)) == before
    out = filled(backend, 3)
    assert contents(backend, backend.add(left, right, out)) == contents(backend, out) == expected
    assert (contents(backend, left), contents(backend, right)) == before
    assert contents(backend, backend.add(left, right, left)) == contents(backend, left) == expected
    assert contents(backend, right) == before[1]


@kits
def test_adding_nothing_copies_negative_zeros_too(kit):
    _, backend = opened(kit)
    left, out = filled(backend, 1, lambda values: values * -0.0), filled(backend, 2)
    copied = backend.add(left, None, out)
    assert contents(backend, copied) == contents(backend, out) == contents(backend, left)
    floats = [vector for vector in arrays(backend, copied).values() if vector.dtype.kind == "f"]
    assert any(np.signbit(vector).any() for vector in floats)
    assert not any(vector.any() for vector in floats)


@kits
def test_divide(kit):
    _, backend = opened(kit)
    layout = backend.layout()
    node = {dtype: filled(backend, 1)[dtype][:end] for dtype, end in layout.divided.items()}
    expected = {dtype: (vector / 3.0).astype(dtype).tobytes() for dtype, vector in arrays(backend, node).items()}
    backend.divide(node, 3.0)
    assert contents(backend, node) == expected


@kits
def test_a_state_comes_back_to_the_bit_with_the_optimizers_slots(kit):
    _, backend = opened(kit)
    step(backend, work(step=0))
    state, before = backend.state(), digests(backend)
    step(backend, work(step=1))
    after = digests(backend)
    assert after != before
    assert digest.hash_arrays(state) == before  # a snapshot, not a view
    assert any(name.startswith("optimizer.") for name in state)

    _, other = opened(kit, OTHER)
    for each in (backend, other):
        each.load(state)
        assert digests(each) == before
        step(each, work(step=1))
        assert digests(each) == after


# torch makes the state of a parameter when it first updates it, so none may be there: see torch/test_saving.py
MADE_LATE = [("backends.kits.torch", "optimizer", "missing")]


def shifted(array):
    """The array with other values, so that half of a load shows."""
    return array._replace(data=array.data + 1) if array.data.dtype.kind == "f" else array


def misfits(array, name):
    """(kind, the arrays that a state has in place of this one, what the error says of it)."""
    part, _, short = name.partition(".")
    cut = array._replace(data=array.data[:, 1:])
    narrow = array._replace(data=array.data.astype("float32"), dtype="float32")
    return {
        "shape": (
            {name: cut},
            f"'{short}' is {cut.data.shape} in the checkpoint and {array.data.shape} in the {part}.",
        ),
        "dtype": ({name: narrow}, f"'{short}' is float32 in the checkpoint and float64 in the {part}."),
        "missing": ({}, f"'{short}' is missing from the checkpoint."),
        "extra": ({name: array, f"{name}x": array}, f"'{short}x' is not in the {part}."),
    }


@kits
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(kit):
    recipe, backend = opened(kit)
    step(backend, work())
    before, weights, state = digests(backend), kit.weights(recipe.model), backend.state()
    for part in ("model", "optimizer"):
        name = next(name for name, array in state.items() if name.startswith(f"{part}.") and array.data.ndim == 2)
        for kind, (others, message) in misfits(state[name], name).items():
            if (kit.__name__, part, kind) in MADE_LATE:
                continue
            misfit = {key: shifted(each) for key, each in state.items() if key != name} | others
            with pytest.raises(StateError, match=f"^The checkpoint does not fit this {part}: {re.escape(message)}"):
                backend.load(misfit)
            assert digests(backend) == before
            near(kit.weights(recipe.model), weights)


@kits
def test_touched_reports_a_change_once(kit):
    recipe, backend = opened(kit)
    state = backend.state()
    step(backend, work())
    assert not backend.touched()
    kit.nudge(recipe.model)
    assert backend.touched()
    assert not backend.touched()
    backend.load(state)  # the other replicas have not seen it
    assert backend.touched()
    assert not backend.touched()


@kits
def test_controls_carry_the_learning_rate(kit):
    recipe, backend = opened(kit)
    _, other = opened(kit)
    step(backend, work())
    step(other, work())
    kit.set_rate(recipe.optimizer, 0.5)
    assert not backend.touched()
    other.turn(backend.controls())
    step(backend, work(step=1))
    step(other, work(step=1))
    assert digests(other) == digests(backend)
    _, slow = opened(kit)
    step(slow, work())
    step(slow, work(step=1))
    assert digests(slow) != digests(backend)


@kits
def test_evaluate_and_forward_take_every_shard_and_change_nothing(kit):
    _, backend = opened(kit, dropout=0.5, metrics=["accuracy"])
    before = digests(backend)
    with backend.computing(work()):
        sums, rows = dict(backend.evaluate(work())), dict(backend.forward(work(X)))
    assert sorted(sums) == list(range(8))
    assert sum(sums.values())[1] == (GAPPED != IGNORED).sum()
    assert [column.name for column in backend.columns] == ["accuracy"]
    hidden = np.maximum(X @ WEIGHTS["0.weight"] + WEIGHTS["0.bias"], 0)
    expected = hidden @ WEIGHTS["1.weight"] + WEIGHTS["1.bias"]  # without dropout
    found = np.concatenate([rows[shard] for shard in range(8)])
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert digests(backend) == before
    assert not backend.touched()


@kits
def test_metric_objects_get_the_whole_batch_in_the_order_of_the_shards(kit):
    def wrapped(devices=1, shards=8):
        model = kit.model(WEIGHTS)
        metrics = {"order": Order(), "accuracy": "accuracy"}
        optimizer = kit.sgd(model, 0.1)
        return lockstep.wrap(model, optimizer, kit.cross_entropy(), metrics=metrics, devices=devices, shards=shards)

    if getattr(kit, "own_metrics", False):
        with pytest.raises(
            ModelError, match=r"The metric Order has the methods update, compute, reset, but is not a Keras metric"
        ):
            wrapped()
        return
    found = []
    for devices in (1, 3):
        with wrapped(devices) as trainer:
            assert len(trainer.devices) == devices
            evaluated = trainer.evaluate((X, LABELS), batch_size=23)
            rows = trainer.predict(X)
            logs = dict(trainer.step((X[:5], LABELS[:5])))  # some shards are empty
            history = trainer.fit((X, LABELS), epochs=2, batch_size=23, validation_data=(X, LABELS), verbose=0).history
            found.append((evaluated, logs, history, trainer.digest()))
    assert found[0] == found[1]
    evaluated, logs, _, _ = found[0]
    order = Order()
    order.update(rows, LABELS)
    np.testing.assert_allclose(evaluated["order"], order.compute(), rtol=TOLERANCE)
    order.reset()
    order.update(rows[:5], LABELS[:5])
    np.testing.assert_allclose(logs["order"], order.compute(), rtol=TOLERANCE)
    with wrapped(shards=1) as trainer:
        np.testing.assert_allclose(trainer.evaluate((X, LABELS))["order"], evaluated["order"], rtol=TOLERANCE)


@kits
def test_native_and_host_undo_each_other(kit):
    _, backend = opened(kit)
    np.testing.assert_equal(backend.host(backend.native(X)), X)
    assert backend.host("text") == "text"
    assert backend.host(3) == 3


@pytest.mark.parametrize("kit", [pytest.param(kit, id=name) for name, kit in KITS.items() if not drives_all(kit)])
def test_a_dump_opens_to_the_same_bits(kit):
    _, backend = opened(kit)
    step(backend, work())
    copy = kit.module.open(cloudpickle.loads(backend.dump()), ["cpu:0"])
    assert digests(copy) == digests(backend)
    for each in (backend, copy):
        step(each, work(step=1))
    assert digests(copy) == digests(backend)


@pytest.mark.parametrize(
    "kit",
    [pytest.param(kit, id=name) for name, kit in KITS.items() if drives_all(kit)],
)
def test_after_verify_every_replica_is_back(kit):
    model = kit.model(WEIGHTS)
    with lockstep.wrap(model, kit.sgd(model, 0.1), kit.cross_entropy(), devices=2, shards=2, threads=1) as trainer:
        rows, names = trainer.predict(X), trainer.session.backend.devices
        assert len(names) == 2
        assert trainer.verify((X, LABELS), steps=1, devices=(1, 1), batch_size=NUM_EXAMPLES).equal
        assert trainer.session.backend.devices == names
        np.testing.assert_array_equal(trainer.predict(X), rows)
        assert np.isfinite(trainer.step((X, LABELS))["loss"])


@kits
def test_arrays_are_not_a_frameworks_own_container(kit):
    _, backend = opened(kit)
    assert backend.source(BATCH, 8, True, 0) is None


@kits
def test_the_first_replica_is_in_the_scripts_process(kit):
    names = ["cpu:0", "cpu:1", "cpu:2"]
    groups = kit.module.processes(names)
    assert [name for group in groups for name in group] == names


@kits
def test_dropout_draws_from_seed_step_and_shard_alone(kit):
    same = (X[:1].repeat(8, 0), np.full(8, 3))  # 8 shards of the same example

    def drawn(backend, **place):
        return [contents(backend, leaf)["float64"] for leaf in leaves(backend, work(same, **place))[0].values()]

    (_, one), (_, other) = (opened(kit, dropout=0.5) for _ in range(2))
    first = drawn(one, seed=1, step=1)
    assert len(set(first)) > 4
    assert drawn(other, seed=2, step=1) != first
    assert drawn(other, seed=1, step=2) != first
    assert drawn(other, seed=1, step=1) == first  # what came before does not matter


@pytest.mark.parametrize(
    "normalized",
    [pytest.param(kit.normalized, id=name) for name, kit in KITS.items() if hasattr(kit, "normalized")],
)
@pytest.mark.parametrize("num_shards", [8, 1])
def test_running_statistics_are_the_shards_own_in_their_shares(normalized, num_shards):
    from_shards = []
    for start, stop in plan.bounds(NUM_EXAMPLES, num_shards):
        alone = normalized.model()
        normalized.run(alone, X[start:stop])
        from_shards.append((stop - start, normalized.read(alone)))
    model = normalized.model()
    kit = next(kit for kit in KITS.values() if getattr(kit, "normalized", None) is normalized)
    with lockstep.wrap(model, kit.sgd(model, 0.1), normalized.loss, devices=1, shards=num_shards, threads=1) as trainer:
        trainer.step((X, X))
        found = normalized.read(model)
        for name, value in found.items():
            if name in normalized.counters:
                assert value == 1
            else:
                expected = sum(size * each[name] for size, each in from_shards) / NUM_EXAMPLES
                np.testing.assert_allclose(value, expected, rtol=TOLERANCE, atol=TOLERANCE)
        trainer.step((X, X))
        assert [normalized.read(model)[name] for name in normalized.counters] == [2] * len(normalized.counters)
