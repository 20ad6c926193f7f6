"""Fitting: one call of `fit`, from its beginning or from where a checkpoint left it."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from lockstep import forward, snapshots
from lockstep.backends.base import HasTrainingMode
from lockstep.beginning import Beginning, starts_anew
from lockstep.callbacks import Chain, History
from lockstep.callbacks.backups import check_backups
from lockstep.callbacks.base import Params
from lockstep.callbacks.callback_list import checked
from lockstep.checkpoint import Checkpoint, Snapshot
from lockstep.core import loop
from lockstep.core.metrics import Column, Sums
from lockstep.data.source import Source
from lockstep.display.verbosity import create_displays
from lockstep.errors import ArgumentError, BatchError, ExactError, StateError
from lockstep.launch.signals import StopRequested, Termination
from lockstep.reading import DEFAULT_BATCH_SIZE
from lockstep.saver import Saver, say
from lockstep.validation import Validation
from lockstep.watch import Watch

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

_FACTS: dict[str, type | tuple[type, ...]] = {
    "place": dict,
    "epochs": int,
    "data": dict,
    "history": dict,
    "callbacks": list,
}
_PLACE: dict[str, type | tuple[type, ...]] = {
    "epoch": int,
    "batch": int,
    "sums": np.ndarray,
    "logs": dict,
    "seconds": float,
    "stopped": bool,
}


@dataclass(frozen=True)
class Asked:
    """What `fit` was asked for, beside the data to train on."""

    epochs: int
    initial_epoch: int
    steps_per_epoch: int | None
    validation: Validation | None
    callbacks: Sequence[Any] | None  # Lockstep's, or Keras's as they are
    checkpoint: str | PathLike[str] | Checkpoint | None
    verbose: int

    def __post_init__(self) -> None:
        if self.initial_epoch and self.checkpoint is not None:
            raise ArgumentError(
                "A run with checkpoint= goes on at the epoch that its folder holds. Got initial_epoch="
                f"{self.initial_epoch} and checkpoint={str(self.checkpoint)!r}. Leave initial_epoch out."
            )


def fit(trainer: "Trainer[Any]", read: Callable[[], Source], asked: Asked) -> History:
    """Trains on the data that `read` gives, and gives the history."""
    team = trainer._team
    history, num_steps = trainer.history, trainer.num_steps
    try:
        with ExitStack() as stack:
            saver, termination = None, Termination()
            if asked.checkpoint is not None:
                saver = stack.enter_context(Saver(asked.checkpoint, team.first))
                stack.enter_context(termination)
            team.ready()
            fitting = Fit(trainer, read, asked, saver, termination)
            stack.callback(fitting.chain.close)
            fitting.begin()
            try:
                loop.fit(fitting, fitting.place, asked.epochs, asked.steps_per_epoch, fitting.chain, time.perf_counter)
            except StopRequested:  # between two steps: the readers of a loader were ended, too
                team.abandon(terminated=True)
                fitting.save_and_leave()
            fitting.chain.on_train_end(fitting.measured or trainer.history.last())
            if saver is not None:
                fitting.answer_late_sigterm()
        team.settle()
    except _Terminated as end:
        if team.first:
            say(str(end))
        raise SystemExit(0) from None
    except Exception:
        if trainer.num_steps == num_steps:  # nothing was trained, so the run before is still the last
            trainer.history = history
        team.abandon()
        raise
    return trainer.history


class _Terminated(Exception):
    """SIGTERM came, and all is saved."""


class Fit:
    """The trainer as the loop sees it, and where the loop stands."""

    def __init__(
        self,
        trainer: "Trainer[Any]",
        read: Callable[[], Source],
        asked: Asked,
        saver: Saver | None,
        termination: Termination,
    ) -> None:
        first = trainer._team.first
        given = checked(asked.callbacks)
        check_backups(given, asked.checkpoint, trainer.exact)
        self._trainer, self._asked, self._read = trainer, asked, read
        self._train = train = self._opened()
        self._validation = None  # one source for all epochs: workers know a pipeline they have seen
        if asked.validation is not None:
            rule = asked.validation
            default = train.batch_size or DEFAULT_BATCH_SIZE
            self._validation = forward.source(trainer, rule.data, rule.batch_size, default, rule.steps)
        # Nothing of the trainer has changed before all that was given has been looked at.
        trainer.stop_training = False
        trainer.history = History(trainer.devices)
        trainer.reset_opening()
        trainer.resumed = ""
        trainer._opening_shown = True  # or was not to be shown
        trainer._batch_size = train.batch_size
        trainer.breakdown = None
        params = Params(
            epochs=asked.epochs,
            steps=asked.steps_per_epoch or train.num_steps,
            batch_size=train.batch_size,
            examples=train.num_examples,
            verbose=asked.verbose,
        )
        self._params = params
        self.place = loop.Place(asked.initial_epoch)
        habits = trainer._recipe.habits
        callbacks = [*(make() for make in habits.callbacks), *given]
        self.chain = Chain(
            [*callbacks, *create_displays(asked.verbose, habits.words)] if first else [], trainer, params
        )
        backend = trainer._backend
        self._modes = backend if isinstance(backend, HasTrainingMode) else None
        self._running: Iterator[Any] | None = None  # data that goes on from epoch to epoch
        self._termination = termination
        self._leaving = False  # whether SIGTERM has come to any of the processes, as all agree
        self._saver = saver
        self._beginning: Beginning | None = None  # until it is saved
        self._state: Any = None  # the data's own, of the moment it was saved
        self._logs: Mapping[str, float] = {}
        self.measured: dict[str, float] = {}  # in the last epoch, before callbacks wrote into its logs
        self._metrics = trainer._metric_objects.start()  # their state over the epoch
        if saver is not None:
            self._metrics.state()  # refuses at once what no checkpoint can hold
        self._watch = Watch(trainer, bool(given)) if trainer._team.share(lambda: asked.verbose >= 2) else None
        if not first:
            for callback in checked(callbacks):
                callback.set_trainer(trainer)  # the first process runs them; they may be asked here

    # -- beginning

    def _opened(self) -> Source:
        train, steps = self._read(), self._asked.steps_per_epoch
        if train.endless and steps is None:
            raise BatchError(
                "This data is endless, so fit() needs steps_per_epoch, e.g. steps_per_epoch=100; or drop .repeat()."
            )
        if steps is not None and train.num_steps is not None and steps > train.num_steps:
            raise BatchError(
                f"An epoch ends with the data. Got steps_per_epoch={steps} for data of {train.num_steps} batches. "
                "Leave it out, or let the data go on: lockstep.data.arrays(x, y).shuffle(0).repeat()."
            )
        return train

    def begin(self) -> None:
        """Takes up a saved run where there is one; then the callbacks begin."""
        facts = None if self._saver is None else self._resume(self._saver)
        self.chain.on_train_begin()
        if facts is not None and self._trainer._team.first:
            self.chain.load_state_dict(facts["callbacks"])
        if facts is None and self._saver is not None:  # the data's state is None: not yet asked for a batch
            self._beginning = Beginning(self._trainer, self._saver, lambda: self._snapshot_at(None))
        restored = self._trainer._team.share(lambda: self.chain.restored)
        if restored is not None:
            if self._trainer.exact and restored.epochs < self._asked.epochs:
                self._check_readable_again()
            if restored.take_over(self._trainer, self._asked.steps_per_epoch or self._train.num_steps):
                self._train = self._opened()
            self.place = loop.Place(restored.epochs)

    def _resume(self, saver: Saver) -> dict[str, Any] | None:
        trainer, asked = self._trainer, self._asked
        found = trainer._team.share(saver.newest)
        if found is None:
            return None
        name, saved = found
        facts: dict[str, Any] = saved.facts.get("fit", {})
        snapshots.check_facts(facts, _FACTS)
        snapshots.check_facts(facts["place"], _PLACE)
        if starts_anew(trainer, saved, self._data()):
            return None
        place = loop.Place(**{name: facts["place"][name] for name in _PLACE})
        place.stopped &= asked.epochs <= facts["epochs"]
        over = place.stopped or place.epoch >= asked.epochs
        if trainer.exact:
            self._check(facts, over)
        seed = trainer._run.seed
        trainer._restore(saved)
        if trainer._run.seed != seed:
            self._train = self._opened()  # in the order of the saved run
        trainer.history.load_state_dict(facts["history"])
        self.place, self._state = place, facts["data"].get("state")
        if place.batch and self._metrics:
            self._metrics.load_state(facts.get("metrics"), trainer.exact, forward.setting(trainer))
        if over:
            held = f"already holds {place.epoch} of {asked.epochs} epochs"
            if place.stopped:
                held = f"holds a run that a callback ended after {place.epoch} of {facts['epochs']} epochs"
            elif place.epoch > asked.epochs:
                held = f"already holds {place.epoch} epochs, more than the {asked.epochs} asked for"
            if trainer._team.first:
                say(f"{saver.folder} {held}; raise epochs or name another folder")
        else:
            where = f"after {place.batch} steps of" if place.batch else "at the beginning of"
            trainer.resumed = f"resumed from {name} {where} epoch {place.epoch + 1}"
        return facts

    def _check(self, facts: Mapping[str, Any], over: bool) -> None:
        """Refuses data that cannot be the saved run's."""
        here, there = self._data(), facts["data"]
        for name, value in here.items():
            if value != there.get(name):
                raise StateError(
                    f"A run goes on with the data it began with. The checkpoint has {name}={there.get(name)}, this run "
                    f"{name}={value}. Give the same, or use exact=False to go on with other data."
                )
        if not over:
            self._check_readable_again()

    def _check_readable_again(self) -> None:
        if self._train.once:
            raise ExactError(
                "A run goes on where it stopped. A generator can only be read from where it is. Give a list, a loader, "
                "arrays or a lockstep.data pipeline; or use exact=False to go on with whatever it gives next."
            )

    def _data(self) -> dict[str, Any]:
        return {
            "batch_size": self._train.batch_size,
            "examples": self._train.num_examples,
            "steps_per_epoch": self._asked.steps_per_epoch,
        }

    # -- the loop's calls

    def stops(self) -> bool:
        trainer = self._trainer
        stop, self._leaving = trainer._team.agree(trainer.stop_training, self._termination.asked)
        return stop

    def batches(self, start: int) -> Iterator[Any]:
        return self._termination.iterate(lambda: self._batches(start))

    def _batches(self, start: int) -> Iterator[Any]:
        train, epoch = self._train, self._trainer._run.epoch
        if not start:
            self._metrics.reset()
        began = time.perf_counter()
        goes_on = train.endless or train.once
        batches = self._going_on(epoch) if goes_on else train.epoch(epoch, start, self._state)
        if start and self._trainer.resumed and not train.endless:
            first = list(itertools.islice(batches, 1))
            self._trainer.resumed += f" ({train.resumes}, {time.perf_counter() - began:.1f} s)"
            batches = itertools.chain(first, batches)
        self._state = None
        return batches if self._watch is None else self._watch.over(batches)

    def _going_on(self, epoch: int) -> Iterator[Any]:
        """Data without epochs of its own: the next one begins where the last one ended."""
        train = self._train
        if self._running is None:
            self._running = train.epoch(0, 0 if train.once else self._trainer.num_steps, self._state)
        first = list(itertools.islice(self._running, 1))
        if not first and train.once and epoch:
            return train.epoch(epoch)  # which says that it is used up
        return itertools.chain(first, self._running)

    def train(self, batch: Any) -> Sums:
        if self._beginning is not None:
            self._beginning.save(batch)
            self._beginning = None
        if self._modes is not None:  # before each step: a callback may have evaluated the model by itself
            self._modes.enter_training_mode()
        sums = self._trainer._train(batch)
        forward.update(self._trainer, self._metrics)
        return sums

    def columns(self) -> list[Column]:
        return list(self._trainer._backend.columns)

    def others(self) -> Mapping[str, float]:
        return self._metrics.values()

    def validates(self, epoch: int) -> bool:
        rule = self._asked.validation
        if rule is None:
            return False
        self._params["validated"] = due = rule.is_due(epoch)
        return due

    def validate(self) -> Mapping[str, float]:
        assert self._validation is not None
        assert self._asked.validation is not None
        return forward.evaluate(
            self._trainer, self._validation, self._termination.iterate, self._asked.validation.steps
        )

    def record(self, epoch: int, logs: Mapping[str, float], seconds: float) -> None:
        self._trainer._run.epoch += 1
        self.measured = dict(logs)
        self._trainer.history.record(epoch, logs, seconds)

    def step_made(self) -> None:
        if self._saver is not None:
            self._saver.step_made(self._trainer.num_steps, self._snapshot)
            self._terminate()

    def epoch_made(self, logs: Mapping[str, float]) -> None:
        self._logs = logs = self._trainer._team.share(lambda: dict(logs))  # the first process has the callbacks
        self._trainer.history.amend(logs)
        if self._watch is not None:
            self._trainer.breakdown = self._watch.breakdown()
        if self._saver is not None:
            last = self.place.stopped or self.place.epoch == self._asked.epochs
            validated = self._params.get("validated", True)
            self._saver.epoch_made(self._trainer.num_steps, last, logs, validated, self._snapshot)
            self._terminate()

    def _terminate(self) -> None:
        """Answers SIGTERM, at the step at which all processes know of it: a launcher's signal reaches them by turns."""
        if self._leaving:
            self.save_and_leave()

    def answer_late_sigterm(self) -> None:
        """Answers a SIGTERM that came while the last epoch was saved, after which nothing asks for it any more."""
        assert self._saver is not None
        _, leaving = self._trainer._team.agree(False, self._termination.asked)
        if leaving:
            self._saver.finish()
            raise _Terminated(f"stopped by SIGTERM after the last step, saved in {self._saver.folder}")

    def save_and_leave(self) -> NoReturn:
        """Saves the run as it stands between two steps, and ends it."""
        assert self._saver is not None
        step = self._trainer.num_steps
        self._saver.save(step, self._snapshot)
        self._saver.finish()
        raise _Terminated(
            f"stopped by SIGTERM after step {step}, saved in {self._saver.folder}; the same command goes on from there"
        )

    def _snapshot(self) -> Snapshot:
        return self._snapshot_at(self._train.state())

    def _snapshot_at(self, state: Any) -> Snapshot:
        trainer, place = self._trainer, self.place
        if place.batch:
            place.logs = dict(loop.Totals(self.columns, place.sums))
        facts = {
            "place": asdict(place),
            "epochs": self._asked.epochs,
            "data": {**self._data(), "state": state},
            "history": trainer.history.state_dict(),
            "callbacks": self.chain.state_dict(),
            "metrics": self._metrics.state() if place.batch else [],
        }
        return trainer._snapshot(fit=facts, logs={} if place.batch else dict(self._logs))
