"""The training loop, which runs the epochs and calls the callbacks; the same code for every framework.

The loop continues from a `LoopPosition`, so that a run can end after any step and be resumed there.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.backends.base import HasTrainingMode
from lockstep.callbacks import CallbackList
from lockstep.core.metric_kinds import merge
from lockstep.core.metrics import Sums
from lockstep.data.source import ArraySource, PipelineSource, Source
from lockstep.errors import BatchError
from lockstep.launch.deferred_signals import Termination
from lockstep.training.evaluate_predict import evaluate
from lockstep.training.fit_options import FitOptions
from lockstep.training.recorder import Recorder
from lockstep.training.session import Session
from lockstep.training.step_logs import Totals
from lockstep.training.timing import StepTimes


@dataclass
class LoopPosition:
    """The position of a loop: the current epoch, the number of its finished batches, and their results."""

    epoch: int = 0
    batch: int = 0
    sums: Sums = field(default_factory=lambda: np.zeros(0))
    logs: dict[str, float] = field(default_factory=dict)  # the logs of the epoch, if no batch of it is left
    seconds: float = 0.0
    stopped: bool = False  # whether a callback has ended the training


class Loop:
    """Runs the epochs of one `fit`, and calls its callbacks."""

    def __init__(
        self,
        session: Session,
        options: FitOptions,
        data: Source,
        validation_data: Source | None,
        callbacks: CallbackList,
        termination: Termination,
    ) -> None:
        self.session = session
        self.data = data
        self.data_state: Any = None  # the saved state of the data, with which the first batch is read
        self.callbacks = callbacks
        self.place = LoopPosition(options.initial_epoch)
        self.metrics = session.metric_objects.start()  # metric objects with the state of the current epoch
        self.measured: dict[str, float] = {}  # the logs of the last epoch, before callbacks wrote into them
        self.terminated = False  # whether one of the processes got SIGTERM; the same value in all processes
        self.options = options
        self._validation_data = validation_data  # the same object in every epoch, so that workers get it only once
        self._termination = termination
        self.times: StepTimes | None = None  # the measured times, for `fit(verbose=2)`
        self.recorder: Recorder | None = None  # writes the report and the trace
        self._endless_batches: Iterator[Any] | None = None  # the batches of infinite data or of a generator

    @property
    def over(self) -> bool:
        """Whether all epochs are finished, or a callback has stopped the training."""
        return self.place.stopped or self.place.epoch >= self.options.epochs

    def run(self, before_first_step: Callable[[Any], None] | None = None) -> Iterator[dict[str, float] | None]:
        """Runs the epochs from the loop's position on; yields after every step and after every epoch.

        After a step it yields None, and after an epoch the logs of this epoch with the values that callbacks wrote.
        `before_first_step` is called with the first batch. The caller calls the callbacks' `on_train_begin` and
        `on_train_end`.
        """
        session, place, callbacks = self.session, self.place, self.callbacks
        backend = session.backend
        modes = backend if isinstance(backend, HasTrainingMode) else None
        while not self.over:
            callbacks.on_epoch_begin(place.epoch)
            started = time.perf_counter() - place.seconds
            totals = Totals(session.columns, place.sums, self.metrics.values)
            first = place.batch
            steps = self.options.steps_per_epoch
            left = None if steps is None else max(steps - first, 0)
            is_quiet = isinstance(self.data, ArraySource | PipelineSource) and not self.metrics and callbacks.are_quiet
            # The iterator has no name, so it is closed at the end of the `for`, and with it the workers of a loader.
            for batch in itertools.islice(self._termination.iterate(functools.partial(self._open_epoch, first)), left):
                callbacks.on_train_batch_begin(place.batch)
                if before_first_step is not None:
                    before_first_step(batch)
                    before_first_step = None
                if modes is not None:  # before each step, because a callback may have put the model into another mode
                    modes.enter_training_mode()
                if is_quiet and session.quiet.period is None:
                    session.quiet.begin()
                totals.add(session.step(batch).sums)
                session.update_metrics(self.metrics)
                place.batch, place.sums, place.seconds = place.batch + 1, totals.sums, time.perf_counter() - started
                callbacks.on_train_batch_end(place.batch - 1, totals)
                place.stopped = self._agree_to_stop()
                if place.stopped:
                    break
                yield None
            session.quiet.end()
            if not place.batch:
                raise BatchError(
                    f"Epoch {place.epoch + 1} of {self.options.epochs} has no batch. Use data with at least one batch "
                    "per epoch; a generator, for example, can be read only once."
                )
            # Reading the totals may wait for a device, which is part of the epoch's time.
            logs = dict(totals) if place.batch > first else merge(place.logs, self.metrics.values())
            place.seconds = time.perf_counter() - started
            yield self._end_epoch(logs)

    def _agree_to_stop(self) -> bool:
        """Returns whether a callback has set `stop_training`; all processes call this after each step and epoch."""
        stop, self.terminated = self.session.processes.agree(self.session.stop_training, self._termination.asked)
        return stop

    def _end_epoch(self, logs: dict[str, float]) -> dict[str, float]:
        """Ends an epoch: validates, records the values and calls the callbacks; returns the logs of the epoch."""
        session, place, callbacks, epoch = self.session, self.place, self.callbacks, self.place.epoch
        rule, data = self.options.validation, self._validation_data
        if rule is not None and data is not None:
            callbacks.params["validated"] = due = rule.is_due(epoch)
            if due:
                callbacks.on_test_begin()
                with nullcontext() if self.recorder is None else self.recorder.measure("validation"):
                    values = evaluate(session, data, rule.steps, self._termination.iterate)
                callbacks.on_test_end(dict(values))  # a copy, because callbacks may write into it
                logs |= {f"val_{name}": value for name, value in values.items()}
        session.run.epoch += 1
        self.measured = dict(logs)
        session.history.record(epoch, logs, place.seconds)
        place.epoch, place.batch, place.sums, place.seconds, place.logs = epoch + 1, 0, np.zeros(0), 0.0, {}
        callbacks.on_epoch_end(epoch, logs)
        place.stopped |= self._agree_to_stop()
        logs = session.processes.share(lambda: dict(logs))  # from the first process, which runs the callbacks
        session.history.amend(logs)
        if self.times is not None:
            session.breakdown = self.times.breakdown()
        if self.recorder is not None:
            self.recorder.end_epoch()
        return logs

    def _open_epoch(self, start: int) -> Iterator[Any]:
        """Returns an iterator over the batches of the current epoch from batch `start` on."""
        session, data = self.session, self.data
        if not start:
            self.metrics.reset()
        began = time.perf_counter()
        epoch = session.run.epoch
        goes_on = data.endless or data.once
        batches = self._go_on(epoch) if goes_on else data.epoch(epoch, start, self.data_state)
        if start and session.resumed and not data.endless:
            first = list(itertools.islice(batches, 1))
            session.resumed += f" ({data.resumes}, {time.perf_counter() - began:.1f} s)"
            batches = itertools.chain(first, batches)
        self.data_state = None
        if self.recorder is not None:
            batches = self.recorder.over(batches)
        return batches if self.times is None else self.times.over(batches)

    def _go_on(self, epoch: int) -> Iterator[Any]:
        """Returns an iterator over the remaining batches of infinite data or of a generator.

        Each epoch begins with the batch after the last batch of the previous epoch.
        """
        data = self.data
        if self._endless_batches is None:
            self._endless_batches = data.epoch(0, 0 if data.once else self.session.run.step, self.data_state)
        first = list(itertools.islice(self._endless_batches, 1))
        if not first and data.once and epoch:
            return data.epoch(epoch)  # raises BatchError, which says that the generator is exhausted
        return itertools.chain(first, self._endless_batches)
