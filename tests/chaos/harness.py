"""A trainer whose workers can be made to fail at any point, beside the run that nothing has disturbed."""

import contextlib
import gc
import os
import re
import sys
import time
from collections import Counter
from typing import NamedTuple
from unittest import mock

import numpy as np

import lockstep
from chaos.faults import EXIT_CODE, PROVE, START, STEP, Saboteur
from lockstep.backends.numpy import SGD, Dense
from lockstep.core.lateness import Deadline

SHARDS, STEPS = 8, 3  # of an epoch
SECONDS_TO_HEAL = 120.0  # a loaded machine takes long to start a process, and several may have to follow each other
SECONDS_TO_STOP = 1.0  # without an answer, before a stopped process is killed

# What stderr says about a worker that ended.
ENDS = {
    "kill": r"was killed by SIGKILL",
    "exit": rf"left with exit code {EXIT_CODE}",
    "stop": r"is ended: no answer for \d+ s",
    "raise": r"is replaced: it raised RuntimeError|could not|left with exit code 1",
}

GENERATOR = np.random.Generator(np.random.PCG64(4))
DATA = GENERATOR.standard_normal((60, 6)), GENERATOR.integers(0, 3, 60)


class Fault(NamedTuple):
    """What happens to the worker in a seat when it passes the point for the first time from a batch of an epoch on."""

    point: str
    kind: str
    seat: int
    batch: int = 0


def list_kinds(point):
    """Returns the faults from which a run goes on alone.

    An exception before a step is the script's own error (what it has sent cannot be read), and so is one in an
    evaluation. Nobody waits for a process that stops before it has taken part.
    """
    if point == "step, received" or point.startswith("evaluate"):
        return ["kill", "stop", "exit"]
    return ["kill", "exit", "raise"] if point in START + PROVE else ["kill", "stop", "exit", "raise"]


def draw_faults(random, devices):
    """Draws faults of one epoch, for different seats; often two in one step.

    One exception and one death in a shard at most: two would be the script's own error, if they met the same shard.
    One end of a replacement at most: with three a seat is left out, and at first a process does not know its seat.
    """
    faults = []
    batch = random.randrange(STEPS)
    for seat in random.sample(range(1, devices), random.randint(1, devices - 1)):
        joins = any(fault.point in START + PROVE for fault in faults)
        point = random.choice(STEP if joins else STEP + START + PROVE)
        kind = random.choice(list_kinds(point))
        if kind == "raise" and any(fault.kind == "raise" for fault in faults):
            kind = "kill"
        if point == "step, in a shard" and any(fault.point == point for fault in faults):
            point = "step, before its shards"
        if point in START + PROVE:  # of the process that replaces this one
            faults.append(Fault("step, all sums there", "kill", seat, batch))
        faults.append(Fault(point, kind, seat, random.choice([batch, random.randrange(STEPS)])))
    return faults


def wrap_numpy(devices, saboteur=None):
    """A small network with dropout and momentum."""
    model = Dense([6, 8, 3], seed=1, dropout=0.2)
    model.saboteur = saboteur
    return lockstep.wrap(model, SGD(0.1, momentum=0.9), "cross_entropy", devices=devices, shards=SHARDS)


def train(trainer, *callbacks):
    """Trains for one epoch."""
    trainer.fit(DATA, epochs=1, batch_size=len(DATA[0]) // STEPS, shuffle=False, verbose=0, callbacks=callbacks)


class Undisturbed:
    """The digests of a run on one device after 0, 1, 2 … epochs."""

    def __init__(self, wrap=wrap_numpy):
        self._trainer = wrap(1)
        self._digests = [self._trainer.digest()]

    def get_digest(self, epochs):
        """Returns the digest after so many epochs."""
        while len(self._digests) <= epochs:
            train(self._trainer)
            self._digests.append(self._trainer.digest())
        return self._digests[epochs]


class Schedule(lockstep.Callback):
    """Orders faults when their batch begins, and notes when each step has ended."""

    def __init__(self, saboteur):
        self.saboteur = saboteur
        self.faults = []
        self.times = []

    def on_train_batch_begin(self, batch, logs=None):
        due, self.faults = self.faults, []
        for fault in due:
            if fault.batch <= batch:
                self.saboteur.order(*fault[:3])
            else:
                self.faults.append(fault)

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.monotonic())


class Chaos:
    """A trainer with workers; a context manager. `undisturbed` is the run with which it is compared."""

    def __init__(self, folder, devices, undisturbed, wrap=wrap_numpy):
        self.devices = devices
        self.epochs = 0
        self.saboteur = Saboteur(folder)
        self.schedule = Schedule(self.saboteur)
        self._deadline = Deadline(0)
        self._wrap, self._undisturbed = wrap, undisturbed
        self._descriptors = None
        self._lines = []
        self._resources = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self._check_closed, list_descriptors())
            wrap = sys.modules["lockstep.wrap"]
            stack.enter_context(mock.patch.object(wrap, "Deadline", return_value=self._deadline))
            stack.enter_context(mock.patch.object(wrap, "print_notice", self._lines.append))
            self.trainer = stack.enter_context(self._wrap(self.devices, self.saboteur))
            assert len(self.trainer.devices) == self.devices
            self.train()
            self.check()
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *raised):
        self._resources.close()

    def _check_closed(self, before):
        self.trainer = None
        gc.collect()  # what a closed region's views are part of
        check_equal(list_descriptors(), before)

    @property
    def pids(self):
        """The workers that take part."""
        return self.trainer.session.processes.pids

    def order(self, *faults):
        """Makes faults happen from the next batch on."""
        if any(fault.kind == "stop" for fault in faults):
            self._deadline.seconds = SECONDS_TO_STOP
        for fault in faults:
            self.saboteur.order(*fault[:3])

    def order_later(self, *faults):
        """Makes faults happen from their batches of the next epoch on."""
        if any(fault.kind == "stop" for fault in faults):
            self._deadline.seconds = SECONDS_TO_STOP
        self.schedule.faults += faults

    def train(self):
        """Trains for one epoch."""
        train(self.trainer, self.schedule)
        self.epochs += 1

    def heal(self):
        """Trains until the faults have happened and every seat has a member again."""
        end = time.monotonic() + SECONDS_TO_HEAL
        while True:
            due, before = [*self.schedule.faults, *self.saboteur.list_due()], self.pids
            began = time.monotonic()
            self.train()
            if not due:  # whoever was stopped is ended now, and on a loaded machine others need not hurry any more
                self._deadline.seconds = 0
            if not due and len(before) == self.devices - 1 and self.pids == before:
                break
            assert time.monotonic() < end, f"not healed; due are {due}; stderr has {self.take_lines()}"
            time.sleep(5 * (time.monotonic() - began))  # processes that start need the processor more

    def check(self):
        """Asserts that no step was lost or made twice, and that every replica has the undisturbed run's bits."""
        steps = self.epochs * STEPS
        check_equal((self.trainer.session.run.step, len(self.schedule.times)), (steps, steps))
        check_equal(self.trainer.digest(), self._undisturbed.get_digest(self.epochs))

    def take_lines(self):
        """Returns the lines printed to stderr since the last call, but for those about processes that join."""
        lines, self._lines[:] = self._lines.copy(), []
        return [line for line in lines if "takes part from step" not in line]

    def check_faults(self, *kinds):
        """Waits until these faults are healed; asserts that each was said in one line and left nothing behind.

        While a stop is due the deadline is so short that on a loaded machine another worker may be late as well.
        """
        self.heal()
        self.check()
        lines, num_stops = self.take_lines(), kinds.count("stop")
        num_late = sum(bool(re.search(ENDS["stop"], line)) for line in lines)
        assert num_late >= num_stops if num_stops else not num_late, lines
        assert len(lines) - num_late == len(kinds) - num_stops, lines
        for kind in kinds:
            assert any(re.match(rf"cpu:\d+.* ({ENDS[kind]})", line) for line in lines), (kind, lines)
        self._descriptors = self._descriptors or list_descriptors()  # the first newcomer's shared memory stays
        check_equal(list_descriptors(), self._descriptors)

    def take_recoveries(self):
        """Returns the point and the kind of each fault since the last call, and the seconds to the next step's end."""
        return [
            (point, kind, next(end for end in self.schedule.times if end > began) - began)
            for point, kind, began in self.saboteur.take_committed()
        ]


def check_equal(found, expected):
    """Asserts, also where pytest does not rewrite assertions."""
    assert found == expected, f"{found} is not {expected}"


def list_descriptors():
    """Returns what this process holds open, by kind."""
    links = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            links[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{name}"))] += 1
    return links
