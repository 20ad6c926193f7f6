"""The trainer: what `wrap` gives back. Thin; what it does is done in core and by the team."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from lockstep import verification
from lockstep.backends.base import Backend, Recipe, Work
from lockstep.callbacks import Callback, Chain, History
from lockstep.callbacks.base import Params
from lockstep.core import batches, digest, loop, plan, tree
from lockstep.core.metrics import Sums
from lockstep.data import source
from lockstep.devices import alike, is_cpu
from lockstep.errors import BatchError, DivergedError, ExactError, PlanError, StateError
from lockstep.fitting import Fit, shown
from lockstep.logs import Logs
from lockstep.run import Run
from lockstep.world import Team

DEFAULT_BATCH_SIZE = 32


class Trainer:
    """A model that trains on every device, with the same bits on any number of them.

    Made by `lockstep.wrap`. Also a context manager: leaving it ends the workers,
    as does the end of the script.

    >>> import lockstep
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> x, y = np.eye(8), np.arange(8) % 2
    >>> with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy", devices=2, shards=4) as trainer:
    ...     logs = trainer.step((x, y))
    ...     trainer.predict(x).shape, sorted(trainer.evaluate((x, y))), len(trainer.digest())
    ((8, 2), ['loss'], 64)
    """

    def __init__(
        self,
        recipe: Recipe,
        backend: Backend,
        start: Callable[[Sequence[str]], Team],
        devices: Sequence[str],
        run: Run,
    ) -> None:
        self.stop_training = False
        self.history = History(tuple(devices))
        self.opening = ""
        self._recipe = recipe
        self._backend = backend
        self._start = start
        self._devices = tuple(devices)
        self._run = run
        self._open_team: Team | None = start(self._devices)
        self._team_devices = self._open_team.devices
        self._batch_size: int | None = None

    # -- training

    def fit(
        self,
        data: Any,
        *extra: Any,
        epochs: int = 1,
        batch_size: int = DEFAULT_BATCH_SIZE,
        shuffle: bool = True,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        callbacks: Sequence[Callback] = (),
        verbose: int = 1,
    ) -> History:
        """Trains for `epochs` passes over the data and gives the history of loss and metrics.

        `data` is `(inputs, targets)`, a nest of arrays, a data set, a loader or an
        iterable of batches. `batch_size` is the whole batch across all devices.
        """
        if extra:
            raise BatchError(f"fit takes one data argument. Got {1 + len(extra)}. Use fit((x, y), ...).")
        train = self._source(data, batch_size, shuffle)
        self._team.ready()
        first = self._team.first
        params = Params(
            epochs=epochs,
            steps=steps_per_epoch or train.num_steps,
            batch_size=train.batch_size,
            examples=train.num_examples,
        )
        self._batch_size = train.batch_size
        self.stop_training = False
        self.history = History(self.devices)
        chain = Chain([*(callbacks if first else ()), *shown(verbose and first)], self, params)
        try:
            loop.fit(
                Fit(self, train, validation_data),
                epochs,
                steps_per_epoch,
                chain,
                self.history.record,
                time.perf_counter,
            )
        finally:
            chain.close()
        return self.history

    def step(self, batch: Any) -> Logs:
        """Trains on one batch: one batch in, one update out."""
        sums = self._train(batches.top(batch))
        step, member = self._run.step, self._team.member

        def norm() -> float:
            if self._run.step != step:
                raise StateError(
                    f"A gradient is there until the next step. Got a question for grad_norm of step {step - 1} after "
                    f"step {self._run.step - 1}. Read logs['grad_norm'] before the next step."
                )
            return self._backend.norm(member.total)

        return Logs(sums, self._backend.columns, norm)

    def _train(self, batch: Any) -> Sums:
        run = self._run
        if run.shards is None or run.threads is None:
            self._decide(batches.count(batch))
        works, parts = self._works(batch, run.step, self._num_shards(batches.count(batch)))
        team = self._team
        team.member.committed = False
        try:
            return team.step(works, parts)
        finally:  # an interrupt that waited for the update comes out here
            run.step += team.member.committed

    # -- forward only

    def evaluate(self, data: Any, *extra: Any, batch_size: int | None = None) -> dict[str, float]:
        """Loss and metrics over the data, with every example counted once."""
        if extra:
            raise BatchError(f"evaluate takes one data argument. Got {1 + len(extra)}. Use evaluate((x, y)).")
        totals = loop.Totals(lambda: list(self._backend.columns))
        for num_shards, _, shards in self._gather("evaluate", self._source(data, batch_size, shuffle=False).epoch(0)):
            sums = tree.fold([shards.get(shard) for shard in range(num_shards)], np.add)
            assert sums is not None
            totals.add(sums)
        return dict(totals)

    def predict(self, inputs: Any, *, batch_size: int | None = None) -> Any:
        """The model's outputs as numpy, in order, one row per example; of a loader's batches the inputs are taken."""
        arrays = isinstance(inputs, dict | tuple) or batches.is_array(inputs)
        read = self._source(inputs, batch_size, shuffle=False).epoch(0)
        return self._rows(read if arrays else map(batches.inputs, read))

    def __call__(self, inputs: Any) -> Any:
        """The outputs for one batch of inputs, split over the replicas, in order, as the framework's own arrays."""
        return self._backend.native(self._rows(iter([inputs])))

    def _rows(self, inputs: Iterator[Any]) -> Any:
        """The outputs for every batch of inputs, put end to end."""
        rows = []
        for num_shards, num_examples, shards in self._gather("forward", inputs):
            sizes = plan.sizes(num_examples, num_shards)
            for shard in sorted(shards):
                batches.check_rows(shards[shard], sizes[shard])
                rows.append(shards[shard])
        return batches.join(rows, np.concatenate)

    def _gather(self, method: str, read: Iterator[Any]) -> Iterator[tuple[int, int, dict[int, Any]]]:
        """For every batch the numbers of shards and examples, and every shard's result; the first batch decides."""
        num_shards = None
        for index, batch in enumerate(read):
            num_examples = batches.count(batch)
            num_shards = num_shards or self._num_shards(num_examples)
            works, _ = self._works(batch, index, num_shards)
            parts = self._team.gather(method, works)
            yield num_shards, num_examples, {shard: value for part in parts for shard, value in part.items()}
        if num_shards is None:
            raise BatchError("Data holds at least one batch. Got none. Give data; a generator can be read once.")

    # -- state

    @property
    def model(self) -> Any:
        """Your own model, up to date."""
        return self._recipe.model

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices, in order."""
        return self._team_devices

    def digest(self) -> str:
        """The sha256 of the whole state: equal digests, equal bits. Also checks that all replicas agree."""
        whole = digest.of_state(self.digests(), self._run.step)
        return whole if self._recipe.options.exact else f"inexact:{whole}"

    def digests(self) -> dict[str, str]:
        """The sha256 of every array of the state, by name."""
        works, _ = self._works(np.zeros(1), self._run.step, self._num_shards(1))
        everyone: dict[int, dict[str, str]] = {
            replica: value for part in self._team.gather("digests", works) for replica, value in part.items()
        }
        first = everyone[0]
        for replica, digests in everyone.items():
            for name in sorted(first.keys() | digests.keys()):
                if digests.get(name) != first.get(name):
                    raise DivergedError(
                        f"Every replica holds the same bits. {name!r} on {self.devices[replica]} differs from "
                        f"{self.devices[0]} after step {self._run.step}. Report this, with the model."
                    )
        return first

    def verify(
        self, data: Any, *, steps: int = 5, devices: Sequence[int] = (1, 2, 4), batch_size: int | None = None
    ) -> verification.Verification:
        """Makes the same steps at each number of devices and compares the bits; the state is as before afterwards."""
        if not self._recipe.options.exact:
            raise ExactError("verify checks the promise of equal bits. This trainer has exact=False. Use exact=True.")
        chosen = source.first(self._source(data, batch_size, shuffle=True), steps)
        shards = self._run.shards or plan.default_shards(batches.count(chosen[0]), max(devices))
        state = self._backend.state()

        def on(count: int) -> Trainer:
            self._backend.load(state)
            trainer = Trainer(
                self._recipe, self._backend, self._start, alike(self._devices, count), replace(self._run, shards=shards)
            )
            if len(trainer.devices) != count:
                raise PlanError(
                    f"verify chooses the devices. It wants {count}, and a launcher has set {len(trainer.devices)}. "
                    "Start the script without torchrun or srun."
                )
            return trainer

        try:
            return verification.verify(on, chosen, devices)
        finally:
            self._backend.load(state)

    def close(self) -> None:
        """Ends the workers. Idempotent; also done at the end of the script. A later use starts them again."""
        if self._open_team is not None:
            self._open_team.close()
            self._open_team = None

    def __enter__(self) -> "Trainer":
        """The trainer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the workers."""
        self.close()

    # -- inside

    @property
    def _team(self) -> Team:
        if self._open_team is None or self._open_team.closed:
            self._open_team = self._start(self._devices)
            self._team_devices = self._open_team.devices
        return self._open_team

    def _source(self, data: Any, batch_size: int | None, shuffle: bool) -> source.Source:
        size = batch_size if batch_size is not None else self._batch_size or DEFAULT_BATCH_SIZE
        if size < 1:
            raise BatchError(f"A batch holds at least one example. Got batch_size={size}. Use 1 or more.")
        own: source.Source | None = self._backend.source(data, size, shuffle, self._run.seed)
        if own is not None:
            return own
        if is_cpu(self._devices[0]):  # numpy gathers without waking the framework's threads
            data = batches.transform(data, self._backend.host)
        return source.of(data, size, shuffle, self._run.seed)

    def _num_shards(self, num_examples: int) -> int:
        return self._run.shards or plan.default_shards(num_examples, len(self.devices))

    def _decide(self, num_examples: int) -> None:
        """Fixes the number of shards and threads at the first batch, for good."""
        run, devices = self._run, self.devices
        shards = self._num_shards(num_examples)
        raised = run.shards is None and shards > plan.default_shards(num_examples, 1)
        run.shards = shards
        run.threads = run.threads or plan.default_threads(self._backend.num_threads(), shards)
        self.opening = run.opening(num_examples, devices, raised)

    def _works(self, batch: Any, step: int, num_shards: int) -> tuple[list[Work], plan.Plan]:
        """Every process's part of the batch."""
        run, team = self._run, self._team
        num_examples = batches.count(batch)
        parts = plan.Plan.even(num_shards, len(team.devices))
        threads = run.threads or plan.default_threads(self._backend.num_threads(), parts.num_shards)
        return [
            Work(pieces, num_examples, parts.num_shards, threads, run.seed, step)
            for pieces in batches.deal(batch, parts, team.replicas())
        ], parts
