"""The loop: epochs of steps, with callbacks between them. Written once for every framework.

Where it stands is a `Place`, so a loop can be left after any step and taken up there.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.backends.base import HasTrainingMode
from lockstep.callbacks import CallbackList
from lockstep.core.metric_kinds import merge
from lockstep.core.metrics import Sums
from lockstep.data.source import Source
from lockstep.errors import BatchError
from lockstep.launch.signals import Termination
from lockstep.training.evaluate import evaluate
from lockstep.training.fit_options import FitOptions
from lockstep.training.session import Session
from lockstep.training.step_logs import Totals
from lockstep.training.timing import StepTimes


@dataclass
class Place:
    """Where a loop stands: the epoch, the batches of it that are done, and what these gave."""

    epoch: int = 0
    batch: int = 0
    sums: Sums = field(default_factory=lambda: np.zeros(0))
    logs: dict[str, float] = field(default_factory=dict)  # the means of the sums, for an epoch that is only to be ended
    seconds: float = 0.0
    stopped: bool = False  # whether a callback has ended the training


class Loop:
    """The epochs of one `fit`."""

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
        self.data_state: Any = None  # what the data said of itself when it was saved; for the first batch
        self.callbacks = callbacks
        self.place = Place(options.initial_epoch)
        self.metrics = session.metric_objects.start()  # their state over the epoch
        self.measured: dict[str, float] = {}  # in the last epoch, before callbacks wrote into its logs
        self.terminated = False  # whether any of the processes got SIGTERM, as all agree
        self.options = options
        self._validation_data = validation_data  # for all epochs: workers have a pipeline that was sent once
        self._termination = termination
        self.times: StepTimes | None = None  # of `fit(verbose=2)`
        self._endless_batches: Iterator[Any] | None = None  # data that goes on from epoch to epoch

    @property
    def over(self) -> bool:
        """Whether no epoch is left."""
        return self.place.stopped or self.place.epoch >= self.options.epochs

    def run(self, before_first_step: Callable[[Any], None] | None = None) -> Iterator[dict[str, float] | None]:
        """Run the epochs from the place on.

        Yields between two steps: None, or between two epochs the logs of the last one with what callbacks wrote into
        them. `before_first_step` is called with the first batch. The beginning and the end of training are the
        caller's.
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
            # No name for the iterator: so it ends with the `for`, and a loader's workers and the time it takes with it.
            for batch in itertools.islice(self._termination.iterate(functools.partial(self._open_epoch, first)), left):
                callbacks.on_train_batch_begin(place.batch)
                if before_first_step is not None:
                    before_first_step(batch)
                    before_first_step = None
                if modes is not None:  # before each step: a callback may have evaluated the model by itself
                    modes.enter_training_mode()
                totals.add(session.step(batch).sums)
                session.update_metrics(self.metrics)
                place.batch, place.sums, place.seconds = place.batch + 1, totals.sums, time.perf_counter() - started
                callbacks.on_train_batch_end(place.batch - 1, totals)
                place.stopped = self._agree_to_stop()
                if place.stopped:
                    break
                yield None
            if not place.batch:
                raise BatchError(
                    f"An epoch holds at least one batch. Epoch {place.epoch + 1} of {self.options.epochs} had "
                    "none. Give more data."
                )
            # May wait for a device, as part of the epoch.
            logs = dict(totals) if place.batch > first else merge(place.logs, self.metrics.values())
            place.seconds = time.perf_counter() - started
            yield self._end_epoch(logs)

    def _agree_to_stop(self) -> bool:
        """Return whether a callback has asked to stop; asked by all processes once after every step and epoch."""
        stop, self.terminated = self.session.processes.agree(self.session.stop_training, self._termination.asked)
        return stop

    def _end_epoch(self, logs: dict[str, float]) -> dict[str, float]:
        """Validate, record, call the callbacks, and return what they made of the logs; the next epoch is next."""
        session, place, callbacks, epoch = self.session, self.place, self.callbacks, self.place.epoch
        rule, data = self.options.validation, self._validation_data
        if rule is not None and data is not None:
            callbacks.params["validated"] = due = rule.is_due(epoch)
            if due:
                callbacks.on_test_begin()
                values = evaluate(session, data, rule.steps, self._termination.iterate)
                callbacks.on_test_end(dict(values))  # callbacks may write into theirs
                logs |= {f"val_{name}": value for name, value in values.items()}
        session.run.epoch += 1
        self.measured = dict(logs)
        session.history.record(epoch, logs, place.seconds)
        place.epoch, place.batch, place.sums, place.seconds, place.logs = epoch + 1, 0, np.zeros(0), 0.0, {}
        callbacks.on_epoch_end(epoch, logs)
        place.stopped |= self._agree_to_stop()
        logs = session.processes.share(lambda: dict(logs))  # the first process has the callbacks
        session.history.amend(logs)
        if self.times is not None:
            session.breakdown = self.times.breakdown()
        return logs

    def _open_epoch(self, start: int) -> Iterator[Any]:
        """Return the batches of this epoch from number `start` on."""
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
        return batches if self.times is None else self.times.over(batches)

    def _go_on(self, epoch: int) -> Iterator[Any]:
        """Return data without epochs of its own: the next one begins where the last one ended."""
        data = self.data
        if self._endless_batches is None:
            self._endless_batches = data.epoch(0, 0 if data.once else self.session.run.step, self.data_state)
        first = list(itertools.islice(self._endless_batches, 1))
        if not first and data.once and epoch:
            return data.epoch(epoch)  # which says that it is used up
        return itertools.chain(first, self._endless_batches)
