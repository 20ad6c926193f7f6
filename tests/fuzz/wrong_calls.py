"""Random wrong calls of every public function, and what becomes of them.

A call is a right one in which one argument, sometimes two, is replaced by a value
from a list of wrong ones. It may end in four ways that are fine: it is refused by
a `LockstepError`; Python refuses the signature; the script's own code (its model,
its loss, its data) raises; or the value was acceptable after all. Anything else is
unclear. Whatever raises leaves the trainer as it was, unless whole steps were made.

    python tests/fuzz/wrong_calls.py torch 1000
"""

import io
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

import lockstep
from lockstep import datasets
from lockstep.errors import LockstepError

X, Y = np.random.default_rng(0).standard_normal((24, 4)).astype("float32"), np.arange(24) % 3
SECONDS = 120  # after which a call hangs, whatever else the machine does
LOCKSTEP = str(Path(lockstep.__file__).parent) + os.sep
# The frames of the script's own code: numpy's model is Lockstep's, and stands for a script's.
OWN = (f"{LOCKSTEP}backends/numpy/network.py", "torch/nn/modules", __file__)


class Hang(BaseException):
    """A call took longer than any of these can."""


class Strange:
    """An object that is nothing in particular."""

    def __repr__(self):
        return "<strange>"


def function(*arguments):
    return 0.5


def wrong_values(rng):
    """One value of each kind, some of them drawn."""
    return [
        None, True, False, 0, -1, -(10**20), 10**6, 2.5, -0.5, float("nan"), float("inf"), 1j,
        "", "x", "loss", "\0", "a/b\0", b"x", Strange(), Strange, function, [], (), {}, set(), [None], ["x"],
        {"x": 1}, {1: "x"}, {None: None}, [[1.0], [1.0, 2.0]], [1, "a"], (X, Y), (X, Y[:5]), (X[:0], Y[:0]), (X, None),
        (X, Y, "x"), (X, Y, Y, Y), [X, Y], X, X[0, 0], X[:0], np.array(3), np.array("x"), np.array(["x"] * 24),
        np.array([1, None], object), np.full((24, 4), np.nan, "float32"), (X, np.full(24, 99)), (X, np.full(24, -5)),
        (X, Y.astype("float32") + 0.5), (X[:, :2], Y), (X.astype("complex64"), Y), ([X], [Y]), {"x": X, "y": Y},
        (x for x in ()), iter([(X, Y)]), range(3), slice(2), Path("/proc/nothing/there"), Path("."), os.devnull,
        np.int64(3), np.float32(2.5), np.bool_(True), Exception("x"), lockstep.EMA(0.5), lockstep.Checkpoint("x"),
        lockstep.data.arrays(X, Y), lockstep.data.stream(iter(())), int(rng.integers(-5, 5)), float(rng.normal()),
    ]  # fmt: skip


def numpy_parts():
    from lockstep.backends.numpy import SGD, Dense

    return Dense([4, 5, 3], seed=1, dtype="float32"), SGD(0.1, momentum=0.9), "cross_entropy"


def torch_parts():
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), torch.nn.CrossEntropyLoss()


PARTS = {"numpy": numpy_parts, "torch": torch_parts}


class Fuzz:
    """Wrong calls of one framework, one after the other, on one trainer after another."""

    def __init__(self, framework, seed, folder):
        self.rng = np.random.default_rng(seed)
        self.parts, self.folder = PARTS[framework], folder
        self.outcomes, self.unclear, self.faults = Counter(), [], []
        self.renew()

    def renew(self):
        """A trainer that has made a step, with a checkpoint of it."""
        self.trainer = lockstep.wrap(*self.parts(), metrics=["accuracy"], shards=2, threads=1, seed=1)
        self.trainer.fit((X, Y), batch_size=12, verbose=0)
        self.saved = self.folder / "saved"
        self.trainer.save(self.saved)
        self.loss = self.evaluate()

    def evaluate(self):
        """The loss, with the batch size of the last fit where nothing spoils that."""
        return self.trainer.evaluate((X, Y), batch_size=None)["loss"]

    def look(self):
        """All that a call that fails must leave as it was."""
        trainer = self.trainer
        return trainer.digest(), dict(trainer.history.history), trainer.num_steps, trainer.learning_rates

    def calls(self):
        """(name, function, positional arguments, keywords) of a right call of everything public."""
        trainer, folder, data = self.trainer, self.folder, lockstep.data.arrays(X, Y)
        model, optimizer, loss = self.parts()
        fit = {"epochs": 1, "batch_size": 12, "shuffle": True, "steps_per_epoch": 2, "validation_data": (X, Y)}
        fit |= {"class_weight": None, "callbacks": [], "checkpoint": None, "verbose": 0}
        wrap = {"metrics": [], "devices": 1, "shards": 2, "threads": 1, "seed": 0, "precision": None}
        wrap |= {"clip_norm": None, "exact": True}

        def rates(values):
            trainer.learning_rates = values

        def closed(name, *arguments):
            trainer.close()
            return getattr(trainer, name)(*arguments)

        def used(callback, **arguments):
            made = callback(**arguments)
            return trainer.fit((X, Y), batch_size=12, callbacks=[made], verbose=0)

        def read(name, *arguments):
            return list(getattr(data, name)(*arguments).batch(5).take(2))

        def cached(path):
            return list(data.cache(path).batch(5))

        early = {"monitor": "loss", "patience": 0, "min_delta": 0.0, "mode": "min", "restore_best": False}
        early |= {"baseline": None, "start_from_epoch": 0}
        plateau = {"monitor": "loss", "factor": 0.5, "patience": 1, "mode": "min", "min_delta": 0.0}
        plateau |= {"cooldown": 0, "min_lr": 0.0}
        schedule = {"schedule": lambda step: 0.1, "per": "step"}
        checkpoint = {"path": folder / "run", "every": 1, "keep": 1, "best": None}
        return [
            ("wrap", lockstep.wrap, (model, optimizer, loss), wrap),
            ("wrap", lockstep.wrap, (model, optimizer, loss), wrap),
            ("fit", trainer.fit, ((X, Y),), fit),
            ("fit", trainer.fit, ((X, Y),), fit),
            ("step", trainer.step, ((X, Y),), {}),
            ("evaluate", trainer.evaluate, ((X, Y),), {"batch_size": 12}),
            ("predict", trainer.predict, (X,), {"batch_size": 12}),
            ("call", trainer, (X,), {}),
            ("save", trainer.save, (folder / "other",), {}),
            ("restore", trainer.restore, (self.saved,), {}),
            ("load_state", trainer.load_state, (trainer.state(),), {}),
            ("copies", trainer.copies, (next(iter(trainer.state())),), {}),
            ("verify", trainer.verify, ((X, Y),), {"steps": 1, "devices": (1, 1), "batch_size": 12}),
            ("learning_rates", rates, ((0.1,),), {}),
            ("close, step", closed, ("step", (X, Y)), {}),
            ("close, evaluate", closed, ("evaluate", (X, Y)), {}),
            ("load_arrays", lockstep.load_arrays, (self.saved,), {}),
            ("replicate", lockstep.replicate, ({"w": X}, 2), {}),
            ("split", lockstep.split, ((X, Y), 2), {}),
            ("allreduce", lockstep.allreduce, ([X.copy(), X.copy()],), {}),
            ("data.arrays", lockstep.data.arrays, (X, Y), {}),
            ("data.indexed", lockstep.data.indexed, (list(X),), {"workers": 0}),
            ("data.stream", lambda each: list(lockstep.data.stream(each).batch(2).take(2)), (iter(X),), {}),
            ("data.shuffle", read, ("shuffle", 1), {}),
            ("data.prefetch", read, ("prefetch", 2), {}),
            ("data.take", read, ("take", 9), {}),
            ("data.map", lambda f, random: list(data.map(f, random=random).batch(5)), (lambda x, y: (x, y), False), {}),
            ("data.batch", lambda n, drop: list(data.batch(n, drop_last=drop)), (5, False), {}),
            ("data.cache", cached, (folder / f"cache{self.rng.integers(10**9)}",), {}),
            ("EarlyStopping", used, (lockstep.EarlyStopping,), early),
            ("ReduceLROnPlateau", used, (lockstep.ReduceLROnPlateau,), plateau),
            ("EMA", used, (lockstep.EMA,), {"decay": 0.5, "every": 1}),
            ("Log", used, (lockstep.Log,), {"function": function, "every": 1}),
            ("CSVLogger", used, (lockstep.CSVLogger,), {"path": folder / "log.csv", "append": False}),
            ("Plot", lockstep.Plot, (folder / "plot.png",), {}),
            ("TensorBoard", lockstep.TensorBoard, (folder / "board",), {"every": 1}),
            ("LearningRateSchedule", used, (lockstep.LearningRateSchedule,), schedule),
            ("Checkpoint", lockstep.Checkpoint, (), checkpoint),
            ("Metric", lockstep.Metric, (function,), {"result": function, "name": "mine"}),
            ("objective", lockstep.objective, (function,), {}),
            ("datasets.digits", datasets.digits, (), {}),
        ]  # fmt: skip

    def draw(self):
        """A wrong call."""
        calls = self.calls()
        name, call, positional, keywords = calls[self.rng.integers(len(calls))]
        positional, keywords = list(positional), dict(keywords)
        first = 1 if getattr(call, "__name__", "") in ("used", "closed", "read") else 0  # these are told what to call
        places = [*range(first, len(positional)), *keywords]
        if not places or self.rng.random() < 0.03:
            keywords["nonsense"] = 1
            places = []
        for place in self.rng.permutation(len(places))[: 1 + (self.rng.random() < 0.1)]:
            values = wrong_values(self.rng)
            value = values[self.rng.integers(len(values))]
            if isinstance(places[place], str):
                keywords[places[place]] = value
            else:
                positional[places[place]] = value
        return name, call, positional, keywords

    def make(self):
        """Makes one wrong call and counts how it ended."""
        name, call, positional, keywords = self.draw()
        before = self.look()
        told = f"{name}({', '.join([*map(short, positional), *(f'{key}={short(keywords[key])}' for key in keywords)])})"
        try:
            with timed():
                call(*positional, **keywords)
        except LockstepError:
            outcome = "refused"
        except Hang:
            outcome = "hang"
            self.faults.append(f"hang: {told}")
        except Exception as error:
            outcome = self.blamed(error)
            if outcome == "unclear":
                lines = traceback.format_tb(error.__traceback__)[-1].strip().splitlines()[0]
                self.unclear.append(f"{told}: {type(error).__name__}: {str(error)[:100]} at {lines[-60:]}")
        else:
            outcome = "accepted"
        self.outcomes[outcome] += 1
        self.check(told, before, outcome)

    def blamed(self, error):
        """Whose error it is: Python's at the call itself, the script's own, or nobody's."""
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        inside = [frame for frame in frames if frame.startswith(LOCKSTEP)]
        if isinstance(error, TypeError) and not inside:
            return "signature"
        if not inside or any(own in frame for frame in frames[frames.index(inside[0]) :] for own in OWN):
            return "own"
        return "unclear"

    def check(self, told, before, outcome):
        """Whether the trainer is as it was, or has made whole steps, and can still be used."""
        try:
            with timed():
                after = self.look()
                loss = self.evaluate()
        except BaseException as error:
            self.faults.append(f"unusable: {told}: {type(error).__name__}: {error}")
            return self.renew()
        if outcome != "accepted" and after[2] == before[2] and (after != before or loss != self.loss):
            self.faults.append(f"changed: {told}")
        if after != before or loss != self.loss:
            self.renew()


@contextmanager
def timed():
    def ring(*_):
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def short(value):
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}{tuple(shape)}" if shape else repr(value)[:40]


def run(framework, count, seed=0):
    """Makes so many wrong calls; gives what was found."""
    there = os.getcwd()
    out, err = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as home, warnings.catch_warnings(), out, err:
        warnings.simplefilter("ignore")
        os.chdir(home)  # where a path such as "x" leads
        try:
            fuzz = Fuzz(framework, seed, Path(home))
            for _ in range(count):
                fuzz.make()
            fuzz.trainer.close()
        finally:
            os.chdir(there)
    return fuzz


if __name__ == "__main__":
    found = run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    print(*found.unclear, *found.faults, dict(found.outcomes), sep="\n")
