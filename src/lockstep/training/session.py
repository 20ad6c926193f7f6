"""The session: one backend, its processes and its run. It also plans each batch.

The trainer's methods and the training loop reach the backend and the other processes only through a session.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lockstep.backends.base import Backend, Recipe, read_compile_seconds
from lockstep.callbacks import History
from lockstep.checkpoint import Snapshot
from lockstep.checkpoint.snapshot import restore_snapshot, take_snapshot
from lockstep.core import batches, digest, hyperparameters, seeds
from lockstep.core.arguments import show
from lockstep.core.loss_reduction import Reduction
from lockstep.core.metric_objects import MetricObjects, MetricPass, Setting
from lockstep.core.metrics import Column
from lockstep.core.outputs import CollectedOutputs, Outputs
from lockstep.core.plan import Plan, default_shards, default_threads, explain_default
from lockstep.core.run_state import Run
from lockstep.core.time_breakdown import Breakdown
from lockstep.core.types import Array, Phases, Work
from lockstep.data.source import Source
from lockstep.devices import is_cpu
from lockstep.display.opening_line import Opening
from lockstep.errors import AttemptAborted, StateError
from lockstep.processes.base import Processes
from lockstep.processes.commands import Command, compute_digests, copy_array, judge_batch
from lockstep.training.collected_outputs import CarriedState, collect_outputs, note_lost
from lockstep.training.open_data import DEFAULT_BATCH_SIZE, open_source
from lockstep.training.session_processes import GrowthPlan, ProcessStarter, QuietPeriods, SessionProcesses
from lockstep.training.step import StepResult


class Session:
    """A backend, its processes and its run, on the chosen devices; `growth` adds devices during training."""

    def __init__(
        self,
        recipe: Recipe,
        backend: Backend,
        starter: ProcessStarter,
        own_devices: Sequence[str],
        run: Run,
        metric_objects: MetricObjects | None = None,
        growth: GrowthPlan | None = None,
    ) -> None:
        self.recipe, self.backend, self.run, self.starter = recipe, backend, run, starter
        self.own_devices = tuple(own_devices)
        self.metric_objects = metric_objects or MetricObjects([], None)
        self.carried = CarriedState(recipe.loss, backend)
        self.stop_training = False  # for callbacks to set
        self.history = History(self.own_devices)
        self.breakdown: Breakdown | None = None  # where the time of `fit(verbose=2)` went
        self.resumed = ""  # from which checkpoint a fit goes on, in words
        self.batch_size: int | None = None  # of the last fit
        self.opening = Opening(run)
        self._last_planned = Plan.even(1, [0]), 0  # the plan of the last batch, and its number of filled shards
        self._last_outcome: weakref.ref[StepResult] | None = None
        self._num_passes = 0  # in which the gradient was computed since the last update
        self._processes = SessionProcesses(starter.start, self.own_devices, growth)
        self.quiet = QuietPeriods(self._processes)
        seed = self.processes.share(lambda: run.seed)  # launched processes take the first one's
        run.seed = run.seed if "seed" in run.given else seed

    @property
    def processes(self) -> Processes:
        """The processes of this training; reading this starts them again if they have ended."""
        return self._processes.get()

    @property
    def has_processes(self) -> bool:
        """Whether the processes are running."""
        return self._processes.is_running

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of all processes."""
        return self._processes.devices

    @property
    def exact(self) -> bool:
        """Whether the results are bit-identical on any number of devices."""
        return self.recipe.options.exact

    @property
    def is_keras(self) -> bool:
        """Whether the model is a Keras model, whose users expect Keras's conventions."""
        return self.recipe.habits.words == "keras"

    def columns(self) -> list[Column]:
        """Returns the metrics' names and places in the vector of sums."""
        return list(self.backend.columns)

    def close(self) -> None:
        """Ends the workers. Idempotent; a later use starts new ones."""
        self._processes.close()

    def resize(self, devices: Any) -> None:
        """Trains on these devices from the next step on; the state and the batch do not change."""
        devices = self.starter.resolve(devices)
        Plan.even(self.run.shards or len(devices), range(len(devices)))  # refuses devices without a shard
        self._processes.resize(devices)
        self.own_devices = self.history.devices = self.devices

    # -- planning

    def open_data(self, data: Any, batch_size: int | None, shuffle: bool, default: int | None = None) -> Source:
        """Opens `data`; a `batch_size` of None means `default`, or the last `fit`'s, or DEFAULT_BATCH_SIZE."""
        default = default or self.batch_size or DEFAULT_BATCH_SIZE
        return open_source(self.recipe, self.backend, self.run.seed, data, batch_size, shuffle, default)

    def num_shards(self, num_examples: int) -> int:
        """Returns the run's number of shards; before it is decided, the default for a batch of this size."""
        return self.run.shards or default_shards(num_examples, len(self.devices), not is_cpu(self.devices[0]))

    def decide_shards(self, num_examples: int) -> None:
        """Decides the numbers of shards and threads at the first batch; sets the opening line of each `fit`."""
        run = self.run
        if run.shards is None:
            self.opening.note = explain_default(num_examples, len(self.devices), not is_cpu(self.devices[0]))
        run.shards = self.num_shards(num_examples)
        run.threads = run.threads or default_threads(self.backend.num_threads(), run.shards)
        # A resumed epoch may go on at a short last batch.
        self.opening.decide(self.batch_size if self.resumed and self.batch_size else num_examples)

    def plan(
        self,
        batch: Any,
        step: int,
        num_shards: int,
        reduction: Reduction | None = None,
        phases: Phases = Phases.ALL,
    ) -> tuple[list[Work], Plan]:
        """Splits a batch; returns each process's part, and the plan of which replica computes which shard."""
        processes = self.processes
        plan = processes.assign(num_shards)
        num_examples = batches.count(batch)
        self._last_planned = plan, min(num_examples, num_shards)
        threads, summed = self._threads(num_shards), reduction is Reduction.SUM
        seed = seeds.gradient_pass(self.run.seed, self._num_passes if phases is Phases.GRADIENT else 0)
        works = [
            Work(pieces, num_examples, num_shards, threads, seed, step, None, summed, phases, self.quiet.period)
            for pieces in batches.deal(batch, plan, processes.replicas(), num_examples)
        ]
        return works, plan

    def plan_nothing(self, num_shards: int | None = None) -> Work:
        """Returns a work without examples: the threads, seed and step for a command without a batch."""
        num_shards = num_shards or self.num_shards(1)
        return Work({}, 0, num_shards, self._threads(num_shards), self.run.seed, self.run.step)

    def _threads(self, num_shards: int) -> int:
        return self.run.threads or default_threads(self.backend.num_threads(), num_shards)

    def read_reduction(self, batch: Any) -> Reduction | None:
        """Returns whether the loss is a sum or a mean, judged by this batch if not known yet; None if the loss says so.

        The process that has the first shard judges, on any number of devices, and the others use its answer.
        """
        if self.run.reduction is not None or self.backend.criterion is None:
            return self.run.reduction
        num_shards = self.num_shards(batches.count(batch))
        works, _ = self.plan(batch, self.run.step, num_shards)
        member, share = self.processes.member, self.processes.share
        return share(lambda: judge_batch(member, works[0], batches.cut(batch, num_shards)))

    # -- commands

    def step(self, batch: Any, phases: Phases = Phases.ALL) -> StepResult:
        """Trains on one batch, or only computes its gradient, and returns the outcome of the step."""
        run = self.run
        self.free_last_gradient()
        # Not right after a step, whose outputs the metric objects may still have to get from the workers.
        self.grow_if_due()
        num_examples = batches.count(batch)
        reduction = self.read_reduction(batch)
        if not self.opening.is_decided:
            self.decide_shards(num_examples)

        def count() -> None:
            run.reduction = reduction
            if phases is Phases.GRADIENT:
                self._num_passes += 1
            else:
                self.count_step()

        began, compiled = time.perf_counter(), read_compile_seconds(self.backend)
        while True:
            works, plan = self.plan(batch, run.step, self.num_shards(num_examples), reduction, phases)
            processes = self.processes
            with suppress(AttemptAborted), processes.step(works, plan) as work:  # else the others make it again
                outcome = processes.member.step(work, plan, count)
                break
        run.note_objective(self.recipe.loss)
        seconds, compiled = time.perf_counter() - began, read_compile_seconds(self.backend) - compiled
        self.opening.compile_seconds += compiled
        self._processes.note_step(seconds - compiled, works[0].num_shards, works[0].threads)
        self._last_outcome = weakref.ref(outcome)
        return outcome

    def grow_if_due(self) -> None:
        """Starts or ends replicas that the script did not ask for, if the steps so far say so; before the next step."""
        if self._processes.grow_if_due():
            self.history.devices = self.devices

    def free_last_gradient(self) -> None:
        """Frees the gradient of the last step for the memory of the next, even if the script still has the logs."""
        if self._last_outcome is not None and (last := self._last_outcome()) is not None:
            last.total = None

    def count_step(self) -> None:
        """Counts a step whose update was made."""
        self.run.step += 1
        self._num_passes = 0

    def run_on_batch(
        self, command: Command, batch: Any, index: int, num_shards: int, reduction: Reduction | None = None
    ) -> dict[int, Any]:
        """Runs the command in every process on its part of a batch; returns all results by shard."""
        return self._gather(command, lambda: self.plan(batch, index, num_shards, reduction)[0])

    def ask(self, question: Command) -> dict[int, Any]:
        """Runs a command without a batch in every process; returns all results by replica, or by shard."""
        return self._gather(question, self._plan_question)

    def _plan_question(self) -> list[Work]:
        work = self.plan_nothing()
        return [work] * len(self.processes.assign(work.num_shards).replicas)

    def _gather(self, command: Command, plan: Callable[[], list[Work]]) -> dict[int, Any]:
        while True:
            with suppress(AttemptAborted):  # else the others do it again
                answers = self.processes.gather(command, plan())
                return {key: value for answer in answers for key, value in answer.items()}

    # -- metric objects and carried state

    def collect_outputs(self) -> CollectedOutputs:
        """Returns what the shards of the last batch have stored, from all processes."""
        return collect_outputs(self.processes, self._plan_question, *self._last_planned)

    def outputs(self, num_shards: int | None = None) -> tuple[Mapping[int, Outputs], Setting]:
        """Returns the outputs of the last batch for metric objects, and the context in which they are computed."""
        found = self.collect_outputs()
        if self.processes.first:
            note_lost(found)
        return found.shards, self.metric_setting(num_shards)

    def update_metrics(self, metrics: MetricPass, num_shards: int | None = None) -> None:
        """Adds the batch that was just computed to the metric objects, if there are any."""
        if metrics and (outputs := self.outputs(num_shards))[0]:
            metrics.update(*outputs)

    def metric_setting(self, num_shards: int | None = None) -> Setting:
        """Returns a function that opens a context with the threads and switches under which a batch is computed."""
        return partial(self.processes.member.computing, self.plan_nothing(num_shards))

    # -- state

    def set_learning_rates(self, rates: Sequence[float]) -> None:
        """Sets the learning rates of the optimizer's groups of parameters, in order."""
        self.backend.set_numbers(hyperparameters.assign_rates(self.backend.numbers(), rates))

    def digests(self) -> dict[str, str]:
        """Returns the sha256 of every array of the state, by name; raises if two replicas differ."""
        return digest.check_equal(self.ask(compute_digests), self.devices, self.run.step)

    def copies(self, name: str) -> list[Array]:
        """Returns one array of the state as it is on each device, in the devices' order."""
        names = next(self.backend.copies())
        if not isinstance(name, str) or name not in names:
            raise StateError(f"The state has no array {show(name)}. Use one of {', '.join(names)}.")
        return [copy for _, copy in sorted(self.ask(partial(copy_array, name)).items())]

    def snapshot(self, **more: Any) -> Snapshot:
        """Returns a copy of the complete state, from which the run can be continued; `more` is added to its `facts`."""
        return take_snapshot(self.recipe, self.backend, self.run, **more)

    @property
    def min_shards(self) -> int:
        """The number of devices that each need a shard: 1 if Lockstep has added the others by itself."""
        return 1 if self._processes.has_grown else len(self.devices)

    def restore(self, saved: Snapshot) -> None:
        """Loads a snapshot; raises before anything is changed if it does not fit."""
        restore_snapshot(saved, self.recipe, self.backend, self.run, self.min_shards)
        self.continue_run()

    def continue_run(self) -> None:
        """Continues from the restored state and run; ends replicas for which the run has no shard."""
        self._processes.shrink(self.run.shards or 1)
        self.history.devices = self.devices
        self._num_passes, self.opening.note = 0, ""
        self.opening.reset()
