"""The trainer: what `wrap` gives back. Thin; what it does is done in core and by the team."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from os import PathLike
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np

from lockstep import fitting, forward, snapshots, verification
from lockstep.backends.base import Array, Backend, Recipe, State, Work
from lockstep.callbacks import History
from lockstep.checkpoint import Checkpoint, Snapshot, find, write
from lockstep.core import batches, digest, hyperparameters, plan
from lockstep.core.arguments import show
from lockstep.core.metric_objects import MetricObjects
from lockstep.core.metrics import Sums
from lockstep.core.reduction import Reduction
from lockstep.core.scores import Scores
from lockstep.core.time_breakdown import Breakdown
from lockstep.data import source
from lockstep.data.class_weights import add_class_weights
from lockstep.devices import is_cpu
from lockstep.display.verbosity import PassLine, level
from lockstep.errors import StateError
from lockstep.keywords import checked_integer, checked_optional, explain_arguments
from lockstep.logs import Logs
from lockstep.processes import Team
from lockstep.reading import DEFAULT_BATCH_SIZE, join_data, open_source
from lockstep.run import Run, device_names
from lockstep.validation import choose_validation, split_validation

Model = TypeVar("Model")


class Trainer(Generic[Model]):
    """A model that trains on every device, with the same bits on any number of them.

    Made by `lockstep.wrap`. Also a context manager: leaving it ends the workers,
    as does the end of the script.

    >>> import lockstep
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> x, y = np.eye(8), np.arange(8) % 2
    >>> with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy", devices=2, shards=4) as trainer:
    ...     logs = trainer.step((x, y), verbose=0)
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
        metric_objects: MetricObjects | None = None,
    ) -> None:
        self.stop_training = False
        self.history = History(tuple(devices))
        self._opening_size: int | None = None  # the batch size that the opening line says, once it is decided
        self.resumed = ""  # where a checkpoint was taken up, for a person to read
        self.breakdown: Breakdown | None = None  # where the time of `fit(verbose=2)` went
        self._recipe = recipe
        self._backend = backend
        self._start = start
        self._devices = tuple(devices)
        self._run = run
        self._metric_objects = metric_objects or MetricObjects([], None)
        self._open_team: Team | None = start(self._devices)
        self._team_devices = self._open_team.devices
        self._batch_size: int | None = None
        self._begun = 0  # steps, also those that failed
        self._shards_note = ""  # what the opening line says about shards that were not given
        self._opening_shown = False
        seed = self._open_team.share(lambda: run.seed)  # launched processes take the first one's
        if "seed" not in run.given:
            run.seed = seed

    @property
    def opening(self) -> str:
        """The line that training opens with: devices, shards, batch, threads, seed; empty before the first batch."""
        if self._opening_size is None:
            return ""
        return self._run.opening(self._opening_size, self.devices, self._shards_note)

    def reset_opening(self) -> None:
        """Lets the next batch decide what the opening line says."""
        self._opening_size = None

    # -- training

    @explain_arguments
    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        shuffle: bool = True,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        validation_split: float = 0.0,
        validation_batch_size: int | None = None,
        validation_steps: int | None = None,
        validation_freq: int | Collection[int] = 1,
        callbacks: Sequence[Any] | None = (),
        checkpoint: str | PathLike[str] | Checkpoint | None = None,
        verbose: int | str = 1,
    ) -> History:
        """Train for `epochs` passes over the data and return the history of loss and metrics.

        Args:
            x: the data: `(inputs, targets)` or `(inputs, targets, weights)` of arrays, nested tuples and dicts of them,
                a data set, a loader, a `lockstep.data` pipeline or an iterable of batches. With `y`, the inputs alone.
            y: the targets beside `x`, if `x` is the inputs.
            epochs: with `initial_epoch` or `checkpoint`, the total, not the number of passes to add.
            batch_size: of the whole batch across all devices; 32 if left out. A loader has its own.
            sample_weight: what each example weighs, beside `x` and `y`.
            class_weight: what the examples of each class weigh; 1 for a class that is left out.
            shuffle: whether arrays and data sets are read in another order every epoch, that of (seed, epoch).
            initial_epoch: the index of the first epoch, for a model that has been trained before.
            steps_per_epoch: ends an epoch after so many steps; the next begins anew, in its own order. Endless data
                needs it, and goes on from epoch to epoch.
            validation_data: evaluated after each epoch; logged as `val_loss` and so on.
            validation_split: the last part of `x` and `y`, arrays only, is validated on and not trained on.
            validation_batch_size: of the validation; training's if left out.
            validation_steps: validates on so many batches only.
            validation_freq: validates after every so many epochs, or after the listed ones, counted from 1.
            callbacks: Lockstep's, or Keras's as they are.
            checkpoint: a folder. The run is saved there before its first step and as it goes, and goes on from there,
                exactly, if the folder holds one.
            verbose: 0 prints nothing, 1 a progress bar and a line per epoch, 2 lines and where the time went.

        `fit` trains in training mode: before each step a model whose root is in evaluation mode is put into training
        mode, all of it, as by `model.train()`. Below a root in training mode each submodule keeps its own mode, so
        `model.train(); model.norm.eval()` freezes a batch norm's statistics.

        Raises a `lockstep.LockstepError` if an argument cannot be used; the trainer is then as it was.
        """
        epochs = checked_integer("epochs", epochs, least=0)
        initial_epoch = checked_integer("initial_epoch", initial_epoch, least=0)
        steps_per_epoch = checked_optional("steps_per_epoch", steps_per_epoch)
        batch_size = checked_optional("batch_size", batch_size)
        data, held_out = split_validation(self, join_data(x, y, sample_weight, "fit"), validation_split)
        rule = choose_validation(validation_data, held_out, validation_batch_size, validation_steps, validation_freq)
        asked = fitting.Asked(epochs, initial_epoch, steps_per_epoch, rule, callbacks, checkpoint, level(verbose))

        def read() -> source.Source:
            found = self._source(data, batch_size, shuffle, DEFAULT_BATCH_SIZE)
            return add_class_weights(found, class_weight, self._backend.host)

        return fitting.fit(self, read, asked)

    @explain_arguments
    def step(self, batch: Any, *, verbose: int | str = 1) -> Logs:
        """Trains on one batch: one batch in, one update out; in the modes that the script has set, as a plain loop.

        The trainer's first step prints the opening line, as `fit` does; not after a `fit`, nor with `verbose=0`.
        """
        shown = level(verbose)
        sums = self._train(batches.top(batch))
        if shown and not self._opening_shown and self._team.first:
            print(self.opening, flush=True)
        self._opening_shown = True
        begun, step, member = self._begun, self._run.step - 1, self._team.member

        def norm() -> float:
            if self._begun != begun:
                raise StateError(
                    f"A gradient is there until the next step begins. Got a question for grad_norm of step {step} "
                    "afterwards. Read logs['grad_norm'] before the next step."
                )
            return self._backend.norm(member.total)

        found = self._metric_objects.compute_later(*forward.outputs(self)) if self._metric_objects else dict
        return Logs(sums, self._backend.columns, norm, found)

    def _train(self, batch: Any) -> Sums:
        run = self._run
        self._begun += 1
        num_examples = batches.count(batch)
        known = run.reduction
        run.reduction = forward.read_reduction(self, batch)
        if self._opening_size is None:
            self._decide(num_examples)
        works, parts = self._works(batch, run.step, self._num_shards(num_examples))
        team = self._team
        team.member.committed = False
        try:
            sums = team.step(works, parts)
        finally:  # an interrupt that waited for the update comes out here
            run.step += team.member.committed
            run.reduction = run.reduction if team.member.committed else known
        run.note_objective(self._recipe.loss)
        return sums

    # -- forward only

    @explain_arguments
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        steps: int | None = None,
        verbose: int | str = "auto",
        return_dict: bool | None = None,
    ) -> dict[str, float] | Scores:
        """Return loss and metrics over the data, with every example counted once.

        A dict by name; for a Keras model Keras's list, which answers by name too, unless `return_dict=True`. `x`, `y`
        and `sample_weight` are as in `fit`; `steps` evaluates so many batches only. `verbose=1` prints a line, which a
        Keras model does by itself.
        """
        batch_size, steps = checked_optional("batch_size", batch_size), checked_optional("steps", steps)
        as_dict = self._recipe.habits.words != "keras" if return_dict is None else return_dict
        data = forward.source(self, join_data(x, y, sample_weight, "evaluate"), batch_size, steps=steps)
        line = PassLine(verbose, self._recipe.habits.words)
        values = forward.evaluate(self, data, line.count, steps)
        if self._team.first:
            line.print_values(values)
        return values if as_dict else Scores(values)

    @explain_arguments
    def predict(
        self, x: Any, *, batch_size: int | None = None, steps: int | None = None, verbose: int | str = "auto"
    ) -> Any:
        """Return the outputs as numpy, in order, one row per example; of a batch with targets only the inputs are read.

        Several inputs are a tuple or a dict; for a Keras model also a list. `steps` predicts so many batches only.
        `verbose=1` prints a line, which a Keras model does by itself.
        """
        batch_size, steps = checked_optional("batch_size", batch_size), checked_optional("steps", steps)
        inputs = forward.inputs(self, x)
        arrays = isinstance(inputs, dict | tuple) or batches.is_array(inputs)
        line = PassLine(verbose, self._recipe.habits.words)
        data = forward.source(self, inputs, batch_size, steps=steps)
        read = line.count(lambda: islice(data.epoch(0), steps))
        rows = forward.rows(self, read if arrays else map(batches.inputs, read))
        if self._team.first:
            line.print_values({})
        return rows

    def __call__(self, inputs: Any) -> Any:
        """The outputs for one batch of inputs, split over the replicas, in order, as the framework's own arrays."""
        given = forward.inputs(self, inputs) if self._recipe.habits.lists else inputs
        return self._backend.native(forward.rows(self, iter([given])))

    # -- state

    @property
    def model(self) -> Model:
        """Your own model, up to date."""
        model: Model = self._recipe.model
        return model

    @property
    def optimizer(self) -> Any:
        """Your own optimizer, up to date."""
        return self._recipe.optimizer

    @property
    def shards(self) -> int | None:
        """The number of parts of every batch; None until it is given or the first batch has decided it."""
        return self._run.shards

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices, in order."""
        return self._team_devices

    @property
    def exact(self) -> bool:
        """Whether the promise of equal bits holds."""
        return self._recipe.options.exact

    @property
    def runs_callbacks(self) -> bool:
        """Whether callbacks run in this process; of those launched together only the first runs them."""
        return self._team.first

    @property
    def num_steps(self) -> int:
        """The number of steps made so far, also by the runs that were resumed."""
        return self._run.step

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The optimizer's learning rate for each of its groups of parameters; can be assigned."""
        return tuple(group["lr"] for group in self._backend.numbers() if "lr" in group)

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        groups = self._backend.numbers()
        count = sum("lr" in group for group in groups)
        hyperparameters.check_rates(rates, count)
        given = iter(rates)
        self._backend.set_numbers([{"lr": float(next(given))} if "lr" in group else {} for group in groups])

    def state(self) -> State:
        """A copy of every array of the state, by name: the model's, the optimizer's and the rest."""
        return self._backend.state()

    def copies(self, name: str) -> list[Array]:
        """One array of the state as it lies on each device, in the devices' order."""
        there = self._backend.state()
        if not isinstance(name, str) or name not in there:
            raise StateError(f"The state has its arrays by name. Got {show(name)}. Name one of {', '.join(there)}.")
        shards = max(len(self.devices), self._num_shards(1))
        works, _ = self._works((np.zeros(shards), name), self._run.step, shards)  # a word goes to every shard
        return [copy for _, copy in sorted(self._gathered("copies", works).items())]

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Takes over a whole state of this model and optimizer."""
        snapshots.check_state(state)
        self._backend.load(state)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a checkpoint into the folder `path`: whole or not at all."""
        self._team.share(lambda: write(path, self._snapshot()))

    def restore(self, path: str | PathLike[str]) -> None:
        """Takes over a checkpoint, or the newest whole one in a folder of them, saved on any number of devices."""
        self._restore(self._team.share(lambda: find(path)))

    def _snapshot(self, **more: Any) -> Snapshot:
        return snapshots.take(self._recipe, self._backend, self._run, **more)

    def _restore(self, saved: Snapshot) -> None:
        snapshots.restore(saved, self._recipe, self._backend, self._run, len(self.devices))
        self._shards_note = ""
        self.reset_opening()

    def digest(self) -> str:
        """The sha256 of the whole state: equal digests, equal bits. Also checks that all replicas agree."""
        whole = digest.hash_state(self.digests(), self._run.step)
        return whole if self.exact else f"inexact:{whole}"

    def digests(self) -> dict[str, str]:
        """The sha256 of every array of the state, by name."""
        return digest.check_equal(self._everyone("digests"), self.devices, self._run.step)

    @explain_arguments
    def verify(
        self, data: Any, *, steps: int = 5, devices: Sequence[int] = (1, 2, 4), batch_size: int | None = None
    ) -> verification.Verification:
        """Makes the same steps at each number of devices and compares the bits; the state is as before afterwards."""
        return verification.of(self, data, steps, devices, batch_size)

    def close(self) -> None:
        """Ends the workers. Idempotent; also done at the end of the script. A later use starts them again."""
        if self._open_team is not None:
            self._open_team.close()
            self._open_team = None

    def __repr__(self) -> str:
        """Return the model's class, the devices, and how far the run has come."""
        run, devices = self._run, self.devices
        decided = f"{run.shards} shard{'s' * (run.shards > 1)}" if run.shards else "shards chosen at the first batch"
        names = f"{len(devices)} device{'s' * (len(devices) > 1)} ({device_names(devices)})"
        exact = "" if self.exact else ", exact=False"
        return f"<Trainer of {type(self.model).__name__}: {names}, {decided}, seed {run.seed}, step {run.step}{exact}>"

    def __enter__(self) -> Self:
        """The trainer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the workers."""
        self.close()

    # -- inside

    def _everyone(self, method: str) -> dict[int, Any]:
        """What every replica answers to a question without a batch."""
        works, _ = self._works(np.zeros(1), self._run.step, self._num_shards(1))
        return self._gathered(method, works)

    def _gathered(self, method: str, works: list[Work]) -> dict[int, Any]:
        return {replica: value for part in self._team.gather(method, works) for replica, value in part.items()}

    @property
    def _team(self) -> Team:
        if self._open_team is None or self._open_team.closed:
            self._open_team = self._start(self._devices)
            self._team_devices = self._open_team.devices
        return self._open_team

    def _source(self, data: Any, batch_size: int | None, shuffle: bool, default: int | None = None) -> source.Source:
        """The data in batches of `batch_size`, or of `default`, or as large as the last training's."""
        return open_source(self, data, batch_size, shuffle, default or self._batch_size or DEFAULT_BATCH_SIZE)

    def _num_shards(self, num_examples: int) -> int:
        devices = self.devices
        return self._run.shards or plan.default_shards(num_examples, len(devices), not is_cpu(devices[0]))

    def _decide(self, num_examples: int) -> None:
        """Fixes the number of shards and threads at the first batch, for good; every `fit` opens with its own line."""
        run, devices = self._run, self.devices
        if run.shards is None:
            self._shards_note = plan.explain_default(num_examples, len(devices), not is_cpu(devices[0]))
        run.shards = self._num_shards(num_examples)
        run.threads = run.threads or plan.default_threads(self._backend.num_threads(), run.shards)
        # A resumed epoch may go on at a short last batch.
        self._opening_size = self._batch_size if self.resumed and self._batch_size else num_examples

    def _works(
        self, batch: Any, step: int, num_shards: int, reduction: Reduction | None = None
    ) -> tuple[list[Work], plan.Plan]:
        """Every process's part of the batch; the run says how the loss is taken, unless `reduction` does."""
        run, team = self._run, self._team
        num_examples = batches.count(batch)
        parts = plan.Plan.even(num_shards, len(team.devices))
        summed = (reduction or run.reduction) is Reduction.SUM
        threads = run.threads or plan.default_threads(self._backend.num_threads(), parts.num_shards)
        return [
            Work(pieces, num_examples, parts.num_shards, threads, run.seed, step, summed=summed)
            for pieces in batches.deal(batch, parts, team.replicas())
        ], parts
