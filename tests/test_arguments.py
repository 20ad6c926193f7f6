"""Arguments of the public functions: what is wrong with a call, in words, before anything is done."""

import re

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.core.types import Array
from lockstep.errors import (
    BatchError,
    CallbackError,
    CheckpointError,
    DeviceError,
    ModelError,
    OptimizerError,
    PlanError,
    SaveError,
    StateError,
)

X, Y = np.zeros((8, 4)), np.arange(8) % 3
DATA = lockstep.data.arrays(X, Y)


def wrapped(**options):
    return lockstep.wrap(Dense([4, 3], seed=1), SGD(0.1), "cross_entropy", **{"shards": 2, **options})


def assigned(rates):
    wrapped().learning_rates = rates


def listed(pipeline):
    return list(pipeline.batch(4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wrapped(clip_norm="x"), PlanError, "clip_norm='x' must be a number above 0."),
        (lambda: wrapped(clip_norm=True), PlanError, "clip_norm=True must be a number above 0."),
        (lambda: wrapped(clip_norm=X), PlanError, "clip_norm=a ndarray of shape (8, 4) must be a number above 0."),
        (lambda: wrapped(precision=X), PlanError, "precision=a ndarray of shape (8, 4) is not supported."),
        (lambda: wrapped(exact="no"), PlanError, "exact must be True or False. Got 'no'. Use for example exact=True."),
        (lambda: wrapped(metrics=True), ModelError, "metrics must be a list or a dict of metrics. Got True."),
        (lambda: wrapped(devices=10**6), DeviceError, "devices=1000000 is more than the limit of 1024 CPU replicas."),
        (lambda: lockstep.Metric(len, name=3), ModelError, "A Metric's name must be a string. Got name=3."),
        (lambda: lockstep.objective(3), ModelError, "An objective must be a function of (model, batch). Got 3."),
        (lambda: assigned(0.1), OptimizerError, "learning_rates=0.1 is not a tuple of finite numbers, one for"),
        (lambda: assigned("a"), OptimizerError, "Use trainer.learning_rates = (0.1,)."),
        (lambda: assigned((None,)), OptimizerError, "learning_rates=(None,) is not a tuple of finite numbers"),
        (lambda: assigned((float("nan"),)), OptimizerError, "learning_rates=(nan,) is not a tuple of finite numbers"),
        (lambda: assigned((0.1, 0.2)), OptimizerError, "learning_rates has 2 rates for 1 groups of parameters."),
        (lambda: wrapped().load_state([1]), StateError, "A state must be a dict of arrays, as trainer"),
        (lambda: wrapped().load_state({"w": X}), StateError, "A state must be a dict of arrays, as trainer.state()"),
        (lambda: wrapped().load_state({"w": Array([1], "x")}), StateError, "A state must be a dict of arrays"),
        (lambda: wrapped().copies([1]), StateError, "The state has no array [1]."),
        (lambda: wrapped().save(3), SaveError, "path must be a path. Got 3. Use for example 'ckpt/'."),
        (lambda: wrapped().save("\0"), SaveError, r"path must be a path. Got '\x00'."),
        (lambda: wrapped().restore(b"x"), CheckpointError, "path must be a path. Got b'x'."),
        (lambda: lockstep.load_arrays(None), CheckpointError, "path must be a path. Got None."),
        (lambda: wrapped().verify((X, Y), devices=2), PlanError, "verify needs numbers of devices, each 1 or more."),
        (lambda: wrapped().verify((X, Y), devices=(1, 0)), PlanError, "each 1 or more. Got devices=(1, 0). Use"),
        (lambda: wrapped().verify((X, Y), steps=0), PlanError, "verify needs 1 step or more. Got steps=0. Use"),
        (lambda: wrapped().verify((X, Y), steps="x"), PlanError, "verify needs 1 step or more. Got steps='x'."),
        (lambda: wrapped().fit((X, Y), shuffle="no"), BatchError, "shuffle must be True or False. Got 'no'."),
        (lambda: wrapped().fit((X, Y), verbose=X), CallbackError, "verbose must be 0, 1, 2 or 'auto'."),
        (lambda: wrapped().evaluate(np.array(3)), BatchError, "Data must be (inputs, targets)"),
        (lambda: wrapped().step((X, Y - 5)), BatchError, "Labels must be from 0 to 2. Got -5. Fix the labels, or"),
        (lambda: wrapped().step((X, Y + 0.5)), BatchError, "needs one integer label for each row of the outputs. Got"),
        (lambda: wrapped()((X, X[:, :2])), BatchError, "weights must each be one array. Got (ndarray(4, 4), "),
        (lambda: wrapped()(np.array(["x"] * 8)), BatchError, "needs arrays of real numbers. Got an array of <U1."),
        (lambda: lockstep.EMA("x"), CallbackError, "decay must be a finite number. Got 'x'. Use for example"),
        (lambda: lockstep.ReduceLROnPlateau(factor=None), CallbackError, "factor must be a finite number. Got None."),
        (lambda: lockstep.ReduceLROnPlateau(min_lr="x"), CallbackError, "min_lr must be a finite number. Got 'x'."),
        (lambda: lockstep.EarlyStopping(3), ModelError, "monitor=3 is not the name of a metric. Use for example"),
        (lambda: lockstep.EarlyStopping(mode=X), ModelError, " is not supported. Use 'auto', 'min' or 'max'."),
        (lambda: lockstep.EarlyStopping(min_delta="x"), ModelError, "min_delta='x' must be a number, 0 or more"),
        (lambda: lockstep.EarlyStopping(baseline="x"), CallbackError, "baseline must be a finite number. Got 'x'."),
        (lambda: lockstep.EarlyStopping(restore_best=2), CallbackError, "restore_best must be True or False. Got 2."),
        (lambda: lockstep.CSVLogger(3), CallbackError, "path must be a path. Got 3. Use for example 'log.csv'."),
        (lambda: lockstep.CSVLogger("x.csv", append=X), CallbackError, "append must be True or False. Got a ndarray"),
        (lambda: lockstep.Plot("."), CallbackError, "path must name a file. Got '.'."),
        (lambda: lockstep.Plot(""), CallbackError, "path must be a path. Got ''. Use for example 'curves.png'."),
        (lambda: lockstep.TensorBoard([]), CallbackError, "folder must be a path. Got []."),
        (lambda: lockstep.TensorBoard("x", every=X), CallbackError, "every must be an integer, 1 or more."),
        (lambda: lockstep.LearningRateSchedule(len, per=X), CallbackError, "per must be 'epoch' or 'step'. Got "),
        (lambda: lockstep.Checkpoint("x", every=X), CheckpointError, "every must be 'epoch' or a number of steps, 1"),
        (lambda: DATA.map(3), BatchError, ".map needs a function, not 3. Use for example .map(lambda x, y: (2 * x,"),
        (lambda: DATA.map(len, random=X), BatchError, "random must be True or False. Got a ndarray of shape (8, 4)."),
        (lambda: DATA.batch(2, drop_last="x"), BatchError, "drop_last must be True or False. Got 'x'."),
        (lambda: DATA.prefetch(10**6), BatchError, "prefetch=1000000 must be an integer from 1 to 1000."),
        (lambda: DATA.take("x"), BatchError, "take='x' must be an integer, 1 or more. Use for example take=1."),
        (lambda: DATA.cache(3), BatchError, "path must be a path. Got 3. Use for example 'examples.cache'."),
        (lambda: listed(DATA.cache(".")), BatchError, "The cache cannot be written to "),
        (lambda: listed(DATA.cache("/proc/a/b")), BatchError, "cannot be written to /proc/a/b: No such file"),
        (lambda: lockstep.data.stream(3), BatchError, "lockstep.data.stream needs an iterable. Got 3. Use a list"),
        (lambda: lockstep.data.stream(np.array(3)), BatchError, "stream needs an iterable. Got array(3)."),
    ],
)  # fmt: skip
def test_a_wrong_argument(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_fit_that_never_makes_a_step_leaves_the_history():
    trainer = wrapped()
    history = trainer.fit((X, Y), epochs=2, batch_size=4, verbose=0)
    for wrong in ({"data": lockstep.data.stream(iter(()))}, {"data": "x"}, {"data": (X, Y), "callbacks": [3]}):
        with pytest.raises(lockstep.LockstepError):
            trainer.fit(**wrong, verbose=0)
        assert trainer.history is history


def test_numbers_of_numpys_are_numbers():
    wrapped(clip_norm=np.float32(1.5), exact=np.bool_(True)).step((X, Y))
    assert lockstep.EMA(np.float32(0.5)).decay == 0.5
    trainer = wrapped()
    trainer.learning_rates = [np.float32(0.5)]
    assert trainer.learning_rates == (0.5,)
