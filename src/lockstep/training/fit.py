"""One call of `fit`: its options, where it begins, what it saves, and how it answers SIGTERM."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from lockstep.backends.base import Deferred
from lockstep.callbacks import CallbackList, History
from lockstep.callbacks.backups import check_backups
from lockstep.callbacks.base import Callback, Params
from lockstep.callbacks.callback_list import check_callbacks
from lockstep.checkpoint import Snapshot
from lockstep.checkpoint.autosave import Autosave, Beginning, print_notice
from lockstep.core import batches
from lockstep.data.source import Source
from lockstep.display.verbosity import create_displays
from lockstep.errors import BatchError
from lockstep.launch.signals import StopRequested, Termination
from lockstep.processes import commands
from lockstep.training.evaluate import open_pass
from lockstep.training.fit_options import FitOptions
from lockstep.training.loop import Loop, Place
from lockstep.training.open_data import DEFAULT_BATCH_SIZE
from lockstep.training.resume import check_readable_again, resume_fit, take_fit_snapshot
from lockstep.training.session import Session
from lockstep.training.timing import StepTimes


def fit(session: Session, trainer: Any, open_data: Callable[[], Source], options: FitOptions) -> History:
    """Train on the data that `open_data` opens, and return the history; callbacks get the `trainer`."""
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
            stack.callback(loop.callbacks.close)
            fitting.begin()
            try:
                for logs in loop.run(fitting.save_beginning):
                    fitting.save_if_due(logs)
            except StopRequested:  # between two steps: the readers of a loader were ended, too
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
        if session.run.step == num_steps:  # nothing was trained, so the run before is still the last
            session.history = history
        processes.abandon()
        raise
    return session.history


class _Terminated(Exception):
    """SIGTERM came, and all is saved."""


class _Fit:
    """The loop of one fit, and what is done before and between its steps."""

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
        self._logs: Mapping[str, float] = {}  # of the last epoch
        data, rule = self._open_data(), options.validation
        validation_data = None
        if rule is not None:
            default = data.batch_size or DEFAULT_BATCH_SIZE
            validation_data = open_pass(session, rule.data, rule.batch_size, default, rule.steps)
        # Nothing of the session has changed before all that was given has been looked at.
        session.stop_training = False
        session.history = History(session.devices)
        session.reset_opening()
        session.resumed = ""
        session.opening_shown = True  # or was not to be shown
        session.batch_size = data.batch_size
        session.breakdown = None
        chain = self._create_callbacks(callbacks, data)
        self.loop = Loop(session, options, data, validation_data, chain, termination)
        if autosave is not None:
            self.loop.metrics.state()  # refuses at once what no checkpoint can hold
        if session.processes.share(lambda: options.verbose >= 2):
            self.loop.times = StepTimes(session, bool(callbacks))

    def _create_callbacks(self, given: Sequence[Callback], data: Source) -> CallbackList:
        """Return the callbacks of this process: only the first runs them, but all may ask them for the trainer."""
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
                "This data is endless, so fit() needs steps_per_epoch, e.g. steps_per_epoch=100; or drop .repeat()."
            )
        if steps is not None and data.num_steps is not None and steps > data.num_steps:
            raise BatchError(
                f"An epoch ends with the data. Got steps_per_epoch={steps} for data of {data.num_steps} batches. "
                "Leave it out, or let the data go on: lockstep.data.arrays(x, y).shuffle(0).repeat()."
            )
        return data

    def begin(self) -> None:
        """Resume a saved run if there is one; then the callbacks begin."""
        session, loop, autosave = self._session, self.loop, self._autosave
        saved_callbacks = None if autosave is None else resume_fit(session, loop, autosave, self._open_data)
        loop.callbacks.on_train_begin()
        if saved_callbacks is not None and session.processes.first:
            loop.callbacks.load_state_dict(saved_callbacks)
        if saved_callbacks is None and autosave is not None:
            backend = session.backend
            has_state = not (isinstance(backend, Deferred) and backend.waits_for_batch())
            # The data's state is None: no batch was asked for yet.
            self._beginning = Beginning(autosave, lambda: self._snapshot(None), has_state)
        restored = session.processes.share(lambda: loop.callbacks.restored)
        if restored is not None:
            if session.exact and restored.epochs < self._options.epochs:
                check_readable_again(loop.data)
            if restored.take_over(self._trainer, self._options.steps_per_epoch or loop.data.num_steps):
                loop.data = self._open_data()
            loop.place = Place(restored.epochs)

    def save_beginning(self, batch: Any) -> None:
        """Save the state before the first step, once the first batch has decided the shards."""
        beginning, session = self._beginning, self._session
        if beginning is None:
            return
        self._beginning = None
        session.decide_shards(batches.count(batch))
        if not beginning.has_state:  # an evaluation makes the variables of a model that has none before its first batch
            works, _ = session.plan(batch, session.run.step, session.num_shards(1), session.run.reduction)
            session.gather(commands.evaluate, works)
        beginning.save(session.run)

    def save_if_due(self, logs: Mapping[str, float] | None) -> None:
        """Save between two steps, or after an epoch with its logs; leave if any process got SIGTERM.

        All processes leave at the same step, because they agree on it: a launcher's signal reaches them one by one.
        """
        if self._autosave is None:
            return
        step, loop = self._session.run.step, self.loop
        if logs is None:
            self._autosave.after_step(step, self._snapshot_now)
        else:
            self._logs = logs
            validated = loop.callbacks.params.get("validated", True)
            self._autosave.after_epoch(step, loop.over, logs, validated, self._snapshot_now)
        if loop.terminated:
            self.save_and_leave()

    def answer_late_sigterm(self) -> None:
        """Answer a SIGTERM that came while the last epoch was saved, after which nothing asks for it any more."""
        if self._autosave is None:
            return
        _, terminated = self._session.processes.agree(False, self._termination.asked)
        if terminated:
            self._autosave.finish()
            raise _Terminated(f"stopped by SIGTERM after the last step, saved in {self._autosave.folder}")

    def save_and_leave(self) -> NoReturn:
        """Save the run as it stands between two steps, and end it."""
        assert self._autosave is not None
        step = self._session.run.step
        self._autosave.save(step, self._snapshot_now)
        self._autosave.finish()
        raise _Terminated(
            f"stopped by SIGTERM after step {step}, saved in {self._autosave.folder}; "
            "the same command goes on from there"
        )

    def _snapshot_now(self) -> Snapshot:
        return self._snapshot(self.loop.data.state())

    def _snapshot(self, data_state: Any) -> Snapshot:
        return take_fit_snapshot(self._session, self.loop, data_state, self._logs)
