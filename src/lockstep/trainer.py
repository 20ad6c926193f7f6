"""The trainer: what `wrap` returns. A façade over the session, which does the work."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, Generic, Self, TypeVar

from lockstep.backends.base import Array, State
from lockstep.callbacks import History
from lockstep.checkpoint import Checkpoint, read_newest, write
from lockstep.checkpoint.snapshot import check_state
from lockstep.core import batches, digest
from lockstep.core.scores import Scores
from lockstep.core.time_breakdown import Breakdown
from lockstep.data.class_weights import add_class_weights
from lockstep.data.source import Source
from lockstep.display.verbosity import parse_verbose
from lockstep.training.call_arguments import checked_optional, explain_arguments
from lockstep.training.evaluate import evaluate_data, predict_batch, predict_data
from lockstep.training.fit import fit
from lockstep.training.fit_options import FitOptions, choose_validation, split_validation
from lockstep.training.open_data import DEFAULT_BATCH_SIZE, join_data, read_arrays
from lockstep.training.session import Session
from lockstep.training.step_logs import StepLogs
from lockstep.training.verify import Verification, verify

Model = TypeVar("Model")


class Trainer(Generic[Model]):
    """A model that trains on every device, with the same bits on any number of them.

    Made by `lockstep.wrap`. Also a context manager: leaving it ends the workers, as does the end of the script.

    >>> import lockstep
    >>> import numpy as np
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> x, y = np.eye(8), np.arange(8) % 2
    >>> with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy", devices=2, shards=4) as trainer:
    ...     logs = trainer.step((x, y), verbose=0)
    ...     trainer.predict(x).shape, sorted(trainer.evaluate((x, y))), len(trainer.digest())
    ((8, 2), ['loss'], 64)
    """

    def __init__(self, session: Session) -> None:
        self.session = session

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
        batch_size = checked_optional("batch_size", batch_size)
        session = self.session
        given = join_data(x, y, sample_weight, "fit")
        cut = partial(read_arrays, session.recipe, session.backend)
        data, held_out = split_validation(given, validation_split, cut)
        rule = choose_validation(validation_data, held_out, validation_batch_size, validation_steps, validation_freq)
        options = FitOptions(
            epochs, initial_epoch, steps_per_epoch, rule, callbacks, checkpoint, parse_verbose(verbose)
        )

        def open_data() -> Source:
            opened = session.open_data(data, batch_size, shuffle, DEFAULT_BATCH_SIZE)
            return add_class_weights(opened, class_weight, session.backend.host, session.recipe.habits.words == "keras")

        return fit(session, self, open_data, options)

    @explain_arguments
    def step(self, batch: Any, *, verbose: int | str = 1) -> StepLogs:
        """Train on one batch: one batch in, one update out; in the modes that the script has set, as a plain loop.

        The trainer's first step prints the opening line, as `fit` does; not after a `fit`, nor with `verbose=0`.
        """
        shown, session = parse_verbose(verbose), self.session
        outcome = session.step(batches.top(batch))
        if shown and not session.opening_shown and session.processes.first:
            print(session.opening, flush=True)
        session.opening_shown = True
        objects, columns = session.metric_objects, session.columns()
        others = objects.compute_later(*session.outputs()) if objects else dict
        return StepLogs(lambda: columns, outcome.sums, others, lambda: session.grad_norm(outcome))

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
        data = join_data(x, y, sample_weight, "evaluate")
        values = evaluate_data(self.session, data, batch_size, steps, verbose)
        as_dict = self.session.recipe.habits.words != "keras" if return_dict is None else return_dict
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
        return predict_data(self.session, x, batch_size, steps, verbose)

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs for one batch of inputs, split over the replicas, as the framework's own arrays."""
        return predict_batch(self.session, inputs)

    @explain_arguments
    def verify(
        self, data: Any, *, steps: int = 5, devices: Sequence[int] = (1, 2, 4), batch_size: int | None = None
    ) -> Verification:
        """Make the same steps at each number of devices and compare the bits; the state is as before afterwards."""
        return verify(self.session, data, steps, devices, batch_size)

    @property
    def model(self) -> Model:
        """Your own model, up to date."""
        model: Model = self.session.recipe.model
        return model

    @property
    def optimizer(self) -> Any:
        """Your own optimizer, up to date."""
        return self.session.recipe.optimizer

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The optimizer's learning rate for each of its groups of parameters; can be assigned."""
        return tuple(group["lr"] for group in self.session.backend.numbers() if "lr" in group)

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        self.session.set_learning_rates(rates)

    def state(self) -> State:
        """Return a copy of every array of the state, by name: the model's, the optimizer's and the rest."""
        return self.session.backend.state()

    def model_arrays(self) -> Mapping[str, Any]:
        """Return the model's arrays as the framework's own, on the first device; valid until the next step."""
        return self.session.backend.model_arrays()

    def copies(self, name: str) -> list[Array]:
        """Return one array of the state as it is on each device, in the devices' order."""
        return self.session.copies(name)

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take over a whole state of this model and optimizer."""
        check_state(state)
        self.session.backend.load(state)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint into the folder `path`: whole or not at all."""
        self.session.processes.share(lambda: write(path, self.session.snapshot()))

    def restore(self, path: str | PathLike[str]) -> None:
        """Take over a checkpoint, or the newest whole one in a folder of them, saved on any number of devices."""
        self.session.restore(self.session.processes.share(lambda: read_newest(path)))

    def digest(self) -> str:
        """Return the sha256 of the whole state: equal digests, equal bits. Also checks that all replicas agree."""
        whole = digest.hash_state(self.digests(), self.num_steps)
        return whole if self.exact else f"inexact:{whole}"

    def digests(self) -> dict[str, str]:
        """Return the sha256 of every array of the state, by name."""
        return self.session.digests()

    @property
    def shards(self) -> int | None:
        """The number of parts of every batch; None until it is given or the first batch has decided it."""
        return self.session.run.shards

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices, in order."""
        return self.session.devices

    @property
    def exact(self) -> bool:
        """Whether the promise of equal bits holds."""
        return self.session.exact

    @property
    def num_steps(self) -> int:
        """The number of steps made so far, also by the runs that were resumed."""
        return self.session.run.step

    @property
    def history(self) -> History:
        """What the last `fit` measured, epoch by epoch."""
        return self.session.history

    @property
    def breakdown(self) -> Breakdown | None:
        """Where the time of `fit(verbose=2)` went."""
        return self.session.breakdown

    @property
    def opening(self) -> str:
        """The line that training opens with: devices, shards, batch, threads, seed; empty before the first batch."""
        return self.session.opening

    @property
    def resumed(self) -> str:
        """From which checkpoint the last `fit` went on, in words; empty if it began anew."""
        return self.session.resumed

    @property
    def runs_callbacks(self) -> bool:
        """Whether callbacks run in this process; of those launched together only the first runs them."""
        return self.session.processes.first

    @property
    def stop_training(self) -> bool:
        """Whether `fit` is to stop: callbacks set it, and `fit` looks after every step and every epoch."""
        return self.session.stop_training

    @stop_training.setter
    def stop_training(self, stop: bool) -> None:
        self.session.stop_training = stop

    def close(self) -> None:
        """End the workers. Idempotent; also done at the end of the script. A later use starts them again."""
        self.session.close()

    def __repr__(self) -> str:
        """Return the model's class, the devices, and how far the run has come."""
        exact = "" if self.exact else ", exact=False"
        return f"<Trainer of {type(self.model).__name__}: {self.session.run.describe(self.devices)}{exact}>"

    def __enter__(self) -> Self:
        """Return the trainer itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """End the workers."""
        self.close()
