"""Implements `fit`: resumes a saved run, trains, saves checkpoints, and stops on SIGTERM."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from lockstep.backends.base import Deferred
from lockstep.callbacks import CallbackList, History
from lockstep.callbacks.base import Callback, Params
from lockstep.callbacks.callback_list import check_callbacks
from lockstep.callbacks.keras_backups import check_backups
from lockstep.checkpoint import Snapshot
from lockstep.checkpoint.autosave import Autosave, Beginning, print_notice
from lockstep.core import batches
from lockstep.data.class_weights import add_class_weights
from lockstep.data.source import Source
from lockstep.display.verbosity import create_displays
from lockstep.errors import BatchError
from lockstep.launch.deferred_signals import StopRequested, Termination
from lockstep.processes import commands
from lockstep.training.evaluate_predict import open_pass
from lockstep.training.fit_options import FitOptions
from lockstep.training.loop import Loop, LoopPosition
from lockstep.training.open_data import DEFAULT_BATCH_SIZE
from lockstep.training.recorder import open_recorder
from lockstep.training.resume import check_readable_again, resume_fit, take_fit_snapshot
from lockstep.training.session import Session
from lockstep.training.timing import StepTimes

_NO_STATE = (
    "fit reads its batches ahead of time, so none of them can start from the state of the one before. Write the loop: "
    "`for batch in batches: logs = trainer.step({**batch, 'state': state}); state = logs.carried`."
)


def open_training_data(
    session: Session, data: Any, batch_size: int | None, shuffle: bool, class_weight: Mapping[int, float] | None
) -> Source:
    """Returns a source of the batches to train on, with example weights from `class_weight`."""
    opened = session.open_data(data, batch_size, shuffle, DEFAULT_BATCH_SIZE)
    return add_class_weights(opened, class_weight, session.backend.host, takes_integers=session.is_keras)


def fit(session: Session, trainer: Any, open_data: Callable[[], Source], options: FitOptions) -> History:
    """Trains on the data that `open_data` returns, and returns the history; callbacks get the `trainer`."""
    processes = session.processes
    history, num_steps = session.history, session.run.step
    try:
        with ExitStack() as stack:
            autosave, termination = None, Termination()
            if options.checkpoint is not None:
                autosave = stack.enter_context(Autosave(options.checkpoint, processes.first))
                stack.enter_context(termination)
            processes.ready()
            fitting = _Fit(session, trainer, open_data, options, autosave, termination)
            loop = fitting.loop
            if loop.recorder is not None:
                stack.enter_context(loop.recorder)
            stack.callback(loop.callbacks.close)
            stack.callback(session.quiet.end)
            stack.enter_context(session.carried.refuse(_NO_STATE))
            fitting.begin()
            try:
                for logs in loop.run(fitting.save_beginning):
                    fitting.save_if_due(logs)
            except StopRequested:  # raised between two steps, because SIGTERM has ended the processes of a loader
                processes.abandon(terminated=True)
                fitting.save_and_leave()
            loop.callbacks.on_train_end(loop.measured or session.history.last())
            fitting.answer_late_sigterm()
        processes.settle()
    except _Terminated as end:
        if processes.first:
            print_notice(str(end))
        raise SystemExit(0) from None
    except Exception:
        if session.run.step == num_steps:  # this call has not trained, so the history of the last call is kept
            session.history = history
        processes.abandon()
        raise
    return session.history


class _Terminated(Exception):
    """Ends a `fit` after SIGTERM, when the run has been saved."""


class _Fit:
    """One call of `fit`: its loop, and what is done before the first step and between two steps."""

    def __init__(
        self,
        session: Session,
        trainer: Any,
        open_data: Callable[[], Source],
        options: FitOptions,
        autosave: Autosave | None,
        termination: Termination,
    ) -> None:
        callbacks = check_callbacks(options.callbacks)
        check_backups(callbacks, options.checkpoint, session.exact)
        self._session, self._trainer, self._options = session, trainer, options
        self._autosave, self._termination = autosave, termination
        self._open = open_data
        self._beginning: Beginning | None = None
        self._logs: Mapping[str, float] = {}  # the logs of the last epoch
        data, rule = self._open_data(), options.validation
        validation_data = None
        if rule is not None:
            default = data.batch_size or DEFAULT_BATCH_SIZE
            validation_data = open_pass(session, rule.data, rule.batch_size, default, rule.steps)
        # All arguments but two paths have been checked; only now is the session changed.
        session.stop_training = False
        session.history = History(session.devices)
        session.opening.reset()
        session.opening.route = ""
        session.resumed = ""
        session.opening.is_shown = True  # `fit` prints the opening line itself, unless verbose=0
        session.batch_size = data.batch_size
        session.breakdown = None
        chain = self._create_callbacks(callbacks, data)
        self.loop = Loop(session, options, data, validation_data, chain, termination)
        if autosave is not None:
            self.loop.metrics.state()  # raises before training if a checkpoint cannot store the metric objects
        if session.processes.share(lambda: options.verbose >= 2):
            self.loop.times = StepTimes(session, bool(callbacks))
            session.opening.route = session.processes.route
        self.loop.recorder = open_recorder(session, trainer, options)  # last: it replaces the files of an earlier run

    def _create_callbacks(self, given: Sequence[Callback], data: Source) -> CallbackList:
        """Returns the callbacks that this process runs; only the first process runs any.

        In the other processes the callbacks get the trainer too, because the script may use it through a callback.
        """
        session, options = self._session, self._options
        params = Params(
            epochs=options.epochs,
            steps=options.steps_per_epoch or data.num_steps,
            batch_size=data.batch_size,
            examples=data.num_examples,
            verbose=options.verbose,
        )
        habits = session.recipe.habits
        callbacks = [*(make() for make in habits.callbacks), *given]
        if session.processes.first:
            return CallbackList([*callbacks, *create_displays(options.verbose, habits.words)], self._trainer, params)
        for callback in check_callbacks(callbacks):
            callback.set_trainer(self._trainer)
        return CallbackList([], self._trainer, params)

    def _open_data(self) -> Source:
        data, steps = self._open(), self._options.steps_per_epoch
        if data.endless and steps is None:
            raise BatchError(
                "fit() needs steps_per_epoch because this data is infinite. Use for example steps_per_epoch=100, or "
                "leave out .repeat()."
            )
        if steps is not None and data.num_steps is not None and steps > data.num_steps:
            raise BatchError(
                f"steps_per_epoch={steps} is more than the {data.num_steps} batches of this data. Leave "
                "steps_per_epoch out, or repeat the data: lockstep.data.arrays(x, y).shuffle(0).repeat()."
            )
        return data

    def begin(self) -> None:
        """Resumes the saved run if there is one, and calls `on_train_begin` of the callbacks."""
        session, loop, autosave = self._session, self.loop, self._autosave
        saved_callbacks = None if autosave is None else resume_fit(session, loop, autosave, self._open_data)
        loop.callbacks.on_train_begin()
        if saved_callbacks is not None and session.processes.first:
            loop.callbacks.load_state_dict(saved_callbacks)
        if saved_callbacks is None and autosave is not None:
            backend = session.backend
            has_state = not (isinstance(backend, Deferred) and backend.waits_for_batch())
            # The data has no state to save, because no batch has been read yet.
            self._beginning = Beginning(autosave, lambda: self._snapshot(None), has_state)
        restored = session.processes.share(lambda: loop.callbacks.restored)
        if restored is not None:
            if session.exact and restored.epochs < self._options.epochs:
                check_readable_again(loop.data)
            if restored.take_over(self._trainer, self._options.steps_per_epoch or loop.data.num_steps):
                loop.data = self._open_data()
            loop.place = LoopPosition(restored.epochs)

    def save_beginning(self, batch: Any) -> None:
        """Saves the state before the first step, after the first batch has determined the number of shards."""
        beginning, session = self._beginning, self._session
        if beginning is None:
            return
        self._beginning = None
        session.decide_shards(batches.count(batch))
        if not beginning.has_state:  # an evaluation makes the variables of a model that has none before its first batch
            num_shards, reduction = session.num_shards(1), session.run.reduction
            session.run_on_batch(commands.evaluate, batch, session.run.step, num_shards, reduction)
        beginning.save(session.run)

    def save_if_due(self, logs: Mapping[str, float] | None) -> None:
        """Saves a checkpoint if one is due; after SIGTERM, saves the run and ends it.

        `logs` are the logs of an epoch that has ended, or None between two steps. The processes agree on the step after
        which they end, because a launcher's signal does not reach all of them at the same time.
        """
        if self._autosave is None:
            return
        step, loop = self._session.run.step, self.loop
        began, num_saves = time.perf_counter(), self._autosave.num_saves
        if logs is None:
            self._autosave.after_step(step, self._snapshot_now)
        else:
            self._logs = logs
            validated = loop.callbacks.params.get("validated", True)
            self._autosave.after_epoch(step, loop.over, logs, validated, self._snapshot_now)
        if loop.recorder is not None and self._autosave.num_saves > num_saves:
            loop.recorder.add_pause("checkpoint", began)
        if loop.terminated:
            self.save_and_leave()

    def answer_late_sigterm(self) -> None:
        """Ends the run if SIGTERM arrived after the last step, for example while the last epoch was saved."""
        if self._autosave is None:
            return
        _, terminated = self._session.processes.agree(False, self._termination.asked)
        if terminated:
            self._autosave.finish()
            raise _Terminated(f"stopped by SIGTERM after the last step, saved in {self._autosave.folder}")

    def save_and_leave(self) -> NoReturn:
        """Saves the run, and ends `fit` by raising `_Terminated`."""
        assert self._autosave is not None
        step = self._session.run.step
        self._autosave.save(step, self._snapshot_now)
        self._autosave.finish()
        raise _Terminated(
            f"stopped by SIGTERM after step {step}, saved in {self._autosave.folder}; the same command continues from "
            "there"
        )

    def _snapshot_now(self) -> Snapshot:
        return self._snapshot(self.loop.data.state())

    def _snapshot(self, data_state: Any) -> Snapshot:
        return take_fit_snapshot(self._session, self.loop, data_state, self._logs)
