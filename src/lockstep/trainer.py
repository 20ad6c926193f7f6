"""The trainer, which `wrap` returns. Its methods check their arguments and call the session."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, Generic, Self, TypeVar

from lockstep.callbacks import History
from lockstep.checkpoint import Checkpoint, read_newest, write
from lockstep.checkpoint.snapshot import check_state
from lockstep.core import batches, digest
from lockstep.core.keras_scores import Scores
from lockstep.core.time_breakdown import Breakdown
from lockstep.core.types import Array, State
from lockstep.display.opening_line import describe_run
from lockstep.display.verbosity import parse_verbose
from lockstep.training.call_arguments import check_optional_integer, explain_arguments
from lockstep.training.evaluate_predict import evaluate_data, predict_batch, predict_data
from lockstep.training.fit import fit, open_training_data
from lockstep.training.fit_options import FitOptions, choose_validation, split_validation
from lockstep.training.gradients import Gradients, apply_gradients, compute_gradients
from lockstep.training.open_data import join_data, read_arrays
from lockstep.training.session import Session
from lockstep.training.step_logs import StepLogs, collect_logs
from lockstep.training.verify import Verification, verify

Model = TypeVar("Model")


class Trainer(Generic[Model]):
    """Trains a model on several devices, with the same bits on any number of devices; created by `lockstep.wrap`.

    >>> import lockstep, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.5), torch.nn.CrossEntropyLoss()
    >>> with lockstep.wrap(net, sgd, loss, shards=4) as trainer:
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
        report: str | PathLike[str] | None = None,
        trace: str | PathLike[str] | None = None,
    ) -> History:
        """Trains for `epochs` epochs and returns the history: the loss and the metrics of every epoch.

        Args:
            x: `(inputs, targets)` or `(inputs, targets, weights)` of arrays, or of tuples and dicts of arrays; a data
                set; a loader; a `lockstep.data` pipeline; an iterable of batches. If `y` is given, the inputs only.
            y: the targets, if `x` is the inputs only.
            epochs: the total number of epochs, including those before `initial_epoch` or in `checkpoint`.
            batch_size: the number of examples in a batch over all devices; 32 if left out. Loaders have their own.
            sample_weight: the weight of each example, if `x` and `y` are arrays.
            class_weight: the weight of the examples of each class; a class that is left out has weight 1.
            shuffle: whether to read arrays and data sets in a different order, from (seed, epoch), in every epoch.
            initial_epoch: the index of the first epoch, for a model that has been trained before.
            steps_per_epoch: the number of steps in an epoch. Infinite data continues in the next epoch.
            validation_data: data to evaluate after each epoch; the results are logged as `val_loss` and so on.
            validation_split: the fraction of the arrays, taken from their end, to validate on instead of training.
            validation_batch_size: the batch size of the validation; that of the training if left out.
            validation_steps: the number of batches to validate on; all batches if left out.
            validation_freq: the number of epochs between two validations, or the epochs to validate, from 1.
            callbacks: callbacks of Lockstep or of Keras.
            checkpoint: a folder, or a `lockstep.Checkpoint`. The run is saved there before its first step and then
                regularly, and is resumed exactly if the folder already has a checkpoint.
            verbose: 0 prints nothing, 1 a progress bar and a line per epoch, 2 lines and a table of step times.
            report: an HTML file with curves, digests, times and faults, written after every epoch (docs/report.md).
            trace: a JSON file with what each device did when, for ui.perfetto.dev.

        A model in evaluation mode is put into training mode before each step, as by `model.train()`. In training mode
        the modes of its submodules are kept, so `model.train(); model.norm.eval()` freezes a batch norm's statistics.

        Raises a `lockstep.LockstepError` if an argument is invalid; the trainer is then unchanged.
        """
        session, batch_size = self.session, check_optional_integer("batch_size", batch_size)
        given = join_data(x, y, sample_weight, "fit")
        read = partial(read_arrays, session.recipe, session.backend)
        data, held_out = split_validation(given, validation_split, read)
        rule = choose_validation(validation_data, held_out, validation_batch_size, validation_steps, validation_freq)
        shown = parse_verbose(verbose)
        options = FitOptions(epochs, initial_epoch, steps_per_epoch, rule, callbacks, checkpoint, shown, report, trace)
        open_data = partial(open_training_data, session, data, batch_size, shuffle, class_weight)
        return fit(session, self, open_data, options)

    @explain_arguments
    def step(self, batch: Any, *, verbose: int | str = 1) -> StepLogs:
        """Trains on one batch and returns the loss and the metrics of this step; does not change the model's mode.

        The first step of a trainer prints the opening line, unless `fit` was called before or `verbose=0`.
        """
        shown, batch = parse_verbose(verbose), batches.restore_tuples(batch)
        return collect_logs(self.session, self.session.step(batch), shown)

    @explain_arguments
    def gradients(self, batch: Any, *, verbose: int | str = 1) -> Gradients:
        """Returns the gradient of one batch by parameter, with its `logs`; changes nothing (docs/gradients.md)."""
        return compute_gradients(self.session, batches.restore_tuples(batch), parse_verbose(verbose))

    @explain_arguments
    def apply(self, gradients: Gradients) -> None:
        """Makes the optimizer's step with these gradients on every replica; the script may have changed them."""
        apply_gradients(self.session, gradients)

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
        """Returns the loss and the metrics over the data by name, with every example counted once.

        For a Keras model the result is a list as in Keras, whose values can be read by name too, or a dict with
        `return_dict=True`. `x`, `y`, `sample_weight` are as in `fit`; `steps` limits the number of batches;
        `verbose=1`, the default for a Keras model, prints a line.
        """
        batch_size, steps = check_optional_integer("batch_size", batch_size), check_optional_integer("steps", steps)
        values = evaluate_data(self.session, join_data(x, y, sample_weight, "evaluate"), batch_size, steps, verbose)
        as_dict = not self.session.is_keras if return_dict is None else return_dict
        return values if as_dict else Scores(values)

    @explain_arguments
    def predict(
        self, x: Any, *, batch_size: int | None = None, steps: int | None = None, verbose: int | str = "auto"
    ) -> Any:
        """Returns the outputs as numpy arrays with one row per example, in order; ignores targets in the data.

        Several inputs are a tuple or a dict; for a Keras model also a list. `steps` and `verbose` are as in `evaluate`.
        """
        batch_size, steps = check_optional_integer("batch_size", batch_size), check_optional_integer("steps", steps)
        return predict_data(self.session, x, batch_size, steps, verbose)

    def __call__(self, inputs: Any) -> Any:
        """Returns the outputs for one batch of inputs as the framework's own arrays; all replicas compute them."""
        return predict_batch(self.session, inputs)

    @explain_arguments
    def verify(
        self, data: Any, *, steps: int = 5, devices: Sequence[int] = (1, 2, 4), batch_size: int | None = None
    ) -> Verification:
        """Trains the same steps on each number of devices; raises `DivergedError` if the bits differ."""
        return verify(self.session, data, steps, devices, batch_size)

    @property
    def model(self) -> Model:
        """The model that was given to `wrap`, with the current state."""
        return self.session.recipe.model  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> Any:
        """The optimizer that was given to `wrap`, with the current state."""
        return self.session.recipe.optimizer

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of the optimizer, one for each group of parameters; can be assigned."""
        return tuple(group["lr"] for group in self.session.backend.numbers() if "lr" in group)

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        self.session.set_learning_rates(rates)

    def state(self) -> State:
        """Returns a copy of every array of the state by name, including those of the optimizer."""
        return self.session.backend.state()

    def model_arrays(self) -> Mapping[str, Any]:
        """Returns the model's arrays by name, as the framework's arrays on the first device, until the next step."""
        return self.session.backend.model_arrays()

    def copies(self, name: str) -> list[Array]:
        """Returns the array of the state with this name from each device, in the devices' order."""
        return self.session.copies(name)

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Loads a complete state, as `state()` returns it; raises `StateError` if it does not fit."""
        check_state(state)
        self.session.backend.load(state)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a checkpoint to the folder `path`; if it fails, raises `SaveError` and leaves the folder unchanged."""
        self.session.processes.share(lambda: write(path, self.session.snapshot()))

    def restore(self, path: str | PathLike[str]) -> None:
        """Loads a checkpoint, or the newest undamaged checkpoint in a folder, saved on any number of devices."""
        self.session.restore(self.session.processes.share(lambda: read_newest(path)))

    def digest(self) -> str:
        """Returns the sha256 of the whole state: equal digests mean equal bits. Raises if the replicas differ."""
        return ("" if self.exact else "inexact:") + digest.hash_state(self.digests(), self.num_steps)

    def digests(self) -> dict[str, str]:
        """Returns the sha256 of every array of the state, by name."""
        return self.session.digests()

    @property
    def shards(self) -> int | None:
        """The number of shards of every batch; None before the first batch if `shards` was not given."""
        return self.session.run.shards

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices, in order."""
        return self.session.devices

    def resize(self, devices: Any) -> None:
        """Trains on other devices, given as in `wrap`, with the same bits; new workers join when they are ready."""
        self.session.resize(devices)

    @property
    def exact(self) -> bool:
        """Whether the results are bit-identical on any number of devices."""
        return self.session.exact

    @property
    def num_steps(self) -> int:
        """The number of steps of the run, including those before it was resumed."""
        return self.session.run.step

    @property
    def history(self) -> History:
        """The loss and the metrics of every epoch of the last `fit`."""
        return self.session.history

    @property
    def breakdown(self) -> Breakdown | None:
        """How the time of the last `fit(verbose=2)` was spent; None if there was none."""
        return self.session.breakdown

    @property
    def opening(self) -> str:
        """The opening line, with devices, shards, batch, threads and seed; empty before the first batch."""
        return self.session.opening.format(self.devices)

    @property
    def resumed(self) -> str:
        """A text that says from which checkpoint the last `fit` was resumed; empty if it was not resumed."""
        return self.session.resumed

    @property
    def runs_callbacks(self) -> bool:
        """Whether callbacks run in this process: of processes that were launched together, only in the first."""
        return self.session.processes.first

    @property
    def stop_training(self) -> bool:
        """Whether `fit` is to stop. Callbacks set this, and `fit` checks it after every step and every epoch."""
        return self.session.stop_training

    @stop_training.setter
    def stop_training(self, stop: bool) -> None:
        self.session.stop_training = stop

    def close(self) -> None:
        """Ends the workers. May be called again; the end of the script calls it too. A later use starts new workers."""
        self.session.close()

    def __repr__(self) -> str:
        """Returns a text with the class of the model, the devices, and the number of steps."""
        run = describe_run(self.session.run, self.devices) + ("" if self.exact else ", exact=False")
        return f"<Trainer of {type(self.model).__name__}: {run}>"

    def __enter__(self) -> Self:
        """Returns the trainer itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends the workers at the end of a `with` block."""
        self.close()
