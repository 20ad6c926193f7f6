"""The session: one backend, the processes that train with it, and the run; planning is here.

What a trainer's methods do is done through a session, and so is everything that reaches other processes.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Self

from lockstep.backends.base import Array, Backend, Recipe, Work
from lockstep.callbacks import History
from lockstep.checkpoint import Snapshot
from lockstep.checkpoint.snapshot import restore_snapshot, take_snapshot
from lockstep.core import batches, digest, hyperparameters
from lockstep.core.arguments import show
from lockstep.core.metric_objects import MetricObjects, MetricPass, Setting
from lockstep.core.metrics import Column
from lockstep.core.outputs import Pair
from lockstep.core.plan import Plan, default_shards, default_threads, explain_default
from lockstep.core.reduction import Reduction
from lockstep.core.time_breakdown import Breakdown
from lockstep.data.source import Source
from lockstep.devices import is_cpu
from lockstep.errors import StateError
from lockstep.processes.base import Processes
from lockstep.processes.commands import Command, compute_digests, copy_array, judge_loss, take_outputs
from lockstep.training.open_data import DEFAULT_BATCH_SIZE, open_source
from lockstep.training.run_state import Run
from lockstep.training.step import TURN, StepResult

Start = Callable[[Sequence[str]], Processes]


class Session:
    """A backend, its processes and its run.

    `start` starts the processes on some devices; `own_devices` are those that it is called with: all of them, or in a
    launched process its one.
    """

    def __init__(
        self,
        recipe: Recipe,
        backend: Backend,
        start: Start,
        own_devices: Sequence[str],
        run: Run,
        metric_objects: MetricObjects | None = None,
    ) -> None:
        self.recipe = recipe
        self.backend = backend
        self.run = run
        self.start = start
        self.own_devices = tuple(own_devices)
        self.metric_objects = metric_objects or MetricObjects([], None)
        self.stop_training = False  # for callbacks to set
        self.history = History(self.own_devices)
        self.breakdown: Breakdown | None = None  # where the time of `fit(verbose=2)` went
        self.resumed = ""  # from which checkpoint a fit goes on, in words
        self.batch_size: int | None = None  # of the last fit
        self.opening_shown = False
        self._opening_size: int | None = None  # the batch size in the opening line, once it is decided
        self._shards_note = ""  # what the opening line says about shards that were not given
        self._last_outcome: weakref.ref[StepResult] | None = None
        self._processes: Processes | None = start(self.own_devices)
        self.devices = self._processes.devices
        seed = self._processes.share(lambda: run.seed)  # launched processes take the first one's
        if "seed" not in run.given:
            run.seed = seed

    @property
    def processes(self) -> Processes:
        """This process and the others; workers that have ended are started again."""
        if self._processes is None or self._processes.closed:
            self._processes = self.start(self.own_devices)
            self.devices = self._processes.devices
        return self._processes

    @property
    def has_processes(self) -> bool:
        """Whether the processes are there now."""
        return self._processes is not None and not self._processes.closed

    @property
    def exact(self) -> bool:
        """Whether the promise of equal bits holds."""
        return self.recipe.options.exact

    def columns(self) -> list[Column]:
        """Return the metrics in the vector of sums."""
        return list(self.backend.columns)

    def close(self) -> None:
        """End the workers. Idempotent; a later use starts them again."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- planning

    def open_data(self, data: Any, batch_size: int | None, shuffle: bool, default: int | None = None) -> Source:
        """Return the source of `data`, in batches of `batch_size`, or of `default`, or of the last fit's size."""
        default = default or self.batch_size or DEFAULT_BATCH_SIZE
        return open_source(self.recipe, self.backend, self.run.seed, data, batch_size, shuffle, default)

    def num_shards(self, num_examples: int) -> int:
        """Return the number of shards of the run, or as long as it is not decided that of such a batch."""
        return self.run.shards or default_shards(num_examples, len(self.devices), not is_cpu(self.devices[0]))

    def decide_shards(self, num_examples: int) -> None:
        """Fix the number of shards and threads at the first batch, for good; every `fit` opens with its own line."""
        run = self.run
        if run.shards is None:
            accelerated = not is_cpu(self.devices[0])
            self._shards_note = explain_default(num_examples, len(self.devices), accelerated)
        run.shards = self.num_shards(num_examples)
        run.threads = run.threads or default_threads(self.backend.num_threads(), run.shards)
        # A resumed epoch may go on at a short last batch.
        self._opening_size = self.batch_size if self.resumed and self.batch_size else num_examples

    def plan(
        self, batch: Any, step: int, num_shards: int, reduction: Reduction | None = None
    ) -> tuple[list[Work], Plan]:
        """Cut a batch: return every process's part of it, and which replica computes which shard."""
        processes = self.processes
        plan = _even_plan(num_shards, len(processes.devices))
        num_examples = batches.count(batch)
        threads, summed = self._threads(num_shards), reduction is Reduction.SUM
        works = [
            Work(pieces, num_examples, num_shards, threads, self.run.seed, step, summed=summed)
            for pieces in batches.deal(batch, plan, processes.replicas())
        ]
        return works, plan

    def plan_nothing(self, num_shards: int | None = None) -> Work:
        """Return a work without examples: the threads, seed and step for what has no batch."""
        num_shards = num_shards or self.num_shards(1)
        return Work({}, 0, num_shards, self._threads(num_shards), self.run.seed, self.run.step)

    def _threads(self, num_shards: int) -> int:
        return self.run.threads or default_threads(self.backend.num_threads(), num_shards)

    def read_reduction(self, batch: Any) -> Reduction | None:
        """Return how the loss is taken: as the run has it, else judged by this batch; None if the loss itself tells.

        The process that has the first shard judges, whatever the number of devices, and the others take its answer.
        """
        run, processes = self.run, self.processes
        if run.reduction is not None or self.backend.criterion is None:
            return run.reduction
        num_shards = self.num_shards(batches.count(batch))
        works, _ = self.plan(batch, run.step, num_shards)
        work = works[0]
        first, *others = work.pieces

        def judge() -> Reduction | None:
            for piece in batches.cut(batch, num_shards):
                if piece is not None:
                    pieces = {first: {0: piece}, **{replica: {} for replica in others}}
                    found = judge_loss(processes.member, replace(work, pieces=pieces))
                    if found is not None:  # a shard whose loss is 0 tells nothing
                        return found
            return None

        return processes.share(judge)

    # -- commands

    def step(self, batch: Any) -> StepResult:
        """Make one step: one batch in, one update out."""
        run = self.run
        self._expire_outcome()
        num_examples = batches.count(batch)
        reduction = self.read_reduction(batch)
        if self._opening_size is None:
            self.decide_shards(num_examples)
        works, plan = self.plan(batch, run.step, self.num_shards(num_examples), reduction)

        def count_step() -> None:
            run.step += 1
            run.reduction = reduction

        processes = self.processes
        with processes.step(works, plan) as work:
            outcome = processes.member.step(work, plan, count_step)
        run.note_objective(self.recipe.loss)
        self._last_outcome = weakref.ref(outcome)
        return outcome

    def gather(self, command: Command, works: Sequence[Work]) -> dict[int, Any]:
        """Run the command in every process on its part of a batch; return all answers by shard."""
        answers = self.processes.gather(command, works)
        return {key: value for answer in answers for key, value in answer.items()}

    def ask(self, question: Command) -> dict[int, Any]:
        """Run a command without a batch in every process; return all answers by replica, or by shard."""
        return self.gather(question, [self.plan_nothing()] * len(self.processes.replicas()))

    def grad_norm(self, outcome: StepResult) -> float:
        """Return the norm of the gradient of the last step."""
        if outcome.total is None:
            raise StateError(
                f"A gradient is there until the next step begins. Got a question for grad_norm of step {outcome.step} "
                "afterwards. Read logs['grad_norm'] before the next step."
            )
        return self.backend.norm(outcome.total)

    def _expire_outcome(self) -> None:
        """Let go of the last gradient, which logs that the script has kept would hold in memory."""
        last = None if self._last_outcome is None else self._last_outcome()
        if last is not None:
            last.total = None

    # -- metric objects

    def outputs(self, num_shards: int | None = None) -> tuple[dict[int, Pair], Setting]:
        """Return outputs and targets of the last batch by shard, and the context to compute metrics of them in."""
        return self.ask(take_outputs), self.metric_setting(num_shards)

    def update_metrics(self, metrics: MetricPass, num_shards: int | None = None) -> None:
        """Bring the batch that was just computed to the metric objects, if there are any."""
        if metrics:
            metrics.update(*self.outputs(num_shards))

    def metric_setting(self, num_shards: int | None = None) -> Setting:
        """Return what gives a context with the threads and switches under which a batch is computed."""
        return partial(_computing, self.backend, self.plan_nothing(num_shards))

    # -- state

    def set_learning_rates(self, rates: Sequence[float]) -> None:
        """Set the learning rate of each of the optimizer's groups of parameters that has one."""
        groups = self.backend.numbers()
        hyperparameters.check_rates(rates, sum("lr" in group for group in groups))
        left = iter(rates)
        self.backend.set_numbers([{"lr": float(next(left))} if "lr" in group else {} for group in groups])

    def digests(self) -> dict[str, str]:
        """Return the sha256 of every array of the state, by name; raise if two replicas differ."""
        return digest.check_equal(self.ask(compute_digests), self.devices, self.run.step)

    def copies(self, name: str) -> list[Array]:
        """Return one array of the state as it is on each device, in the devices' order."""
        names = self.backend.state()
        if not isinstance(name, str) or name not in names:
            raise StateError(f"The state has its arrays by name. Got {show(name)}. Name one of {', '.join(names)}.")
        return [copy for _, copy in sorted(self.ask(partial(copy_array, name)).items())]

    def snapshot(self, **more: Any) -> Snapshot:
        """Return a copy of everything that the rest of the run follows from; `more` is added to its facts."""
        return take_snapshot(self.recipe, self.backend, self.run, **more)

    def restore(self, saved: Snapshot) -> None:
        """Take over a snapshot; one that does not fit is refused before anything is changed."""
        restore_snapshot(saved, self.recipe, self.backend, self.run, len(self.devices))
        self._shards_note = ""
        self.reset_opening()

    # -- the opening line

    @property
    def opening(self) -> str:
        """The line that training opens with; empty before the first batch."""
        if self._opening_size is None:
            return ""
        return self.run.opening(self._opening_size, self.devices, self._shards_note)

    def reset_opening(self) -> None:
        """Let the next batch decide what the opening line says."""
        self._opening_size = None


@contextmanager
def _computing(backend: Backend, work: Work) -> Iterator[None]:
    with TURN, backend.computing(work):
        yield


@cache
def _even_plan(num_shards: int, num_devices: int) -> Plan:
    """Return the plan; the same object for the same numbers, so that comparing plans costs nothing."""
    return Plan.even(num_shards, num_devices)
