"""TensorBoard: a run's curves as event files, named as Keras names them."""

from os import PathLike
from pathlib import Path

from lockstep.callbacks.arguments import steps
from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.callbacks.tensorboard_events import Events, require
from lockstep.core.arguments import check_path
from lockstep.display.curves import VALIDATION
from lockstep.display.number_format import as_float
from lockstep.errors import CallbackError


class TensorBoard(Callback):
    """Writes `epoch_loss` and so on over the epochs, into `folder/train` and `folder/validation`.

    The learning rate is `epoch_learning_rate`; further groups' are `epoch_learning_rate_1` and so
    on. With `every=100` also `batch_loss` and so on, after every hundredth step, over the
    steps of the run; reading them waits for the device. Look with `tensorboard --logdir folder`.

    A resumed run takes back what it makes again. With `every=100` this is so over the
    steps; an epoch that ended after the checkpoint is there twice, with the same numbers.

    >>> import lockstep, numpy as np, tempfile
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> x, y = np.eye(8), np.arange(8) % 2
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy") as trainer:
    ...         history = trainer.fit((x, y), validation_data=(x, y), callbacks=[TensorBoard(folder)], verbose=0)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['train', 'validation']
    """

    def __init__(self, folder: str | PathLike[str], every: int | str = "epoch") -> None:
        self.folder = Path(check_path("folder", folder, CallbackError, "runs/first"))
        self._steps = steps(every)
        self._files: dict[str, Events] = {}
        self._first_epoch: int | None = None

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        require()
        self._first_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        if self._first_epoch is None:
            self._first_epoch = epoch
            self._first_step = self.trainer.num_steps

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self._steps and self.trainer.num_steps % self._steps == 0:
            self._write("train", "batch", self.trainer.num_steps, {**logs, **self._rates()})

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        train = {name: value for name, value in logs.items() if not name.startswith(VALIDATION)}
        validation = {name.removeprefix(VALIDATION): logs[name] for name in logs if name not in train}
        self._write("train", "epoch", epoch, {**train, **self._rates()})
        if validation:
            self._write("validation", "epoch", epoch, validation)
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Ends the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _rates(self) -> dict[str, float]:
        rates = self.trainer.learning_rates
        return {f"learning_rate_{index}" if index else "learning_rate": rate for index, rate in enumerate(rates)}

    def _write(self, run: str, prefix: str, step: int, values: Logs) -> None:
        numbers = {name: as_float(value) for name, value in values.items()}  # of what callbacks wrote, numbers alone
        scalars = {f"{prefix}_{name}": value for name, value in numbers.items() if isinstance(value, float)}
        self._file(run).scalars(step, scalars)

    def _file(self, run: str) -> Events:
        """The file of a sub-run, made when there is something for it."""
        if run not in self._files:
            self._files[run] = Events(self.folder / run)
            if getattr(self.trainer, "resumed", ""):
                assert self._first_epoch is not None
                # No epoch has a greater number than a step has, so nothing that counts is taken back.
                over_steps = run == "train" and self._steps
                self._files[run].restart(self._first_step + 1 if over_steps else self._first_epoch)
        return self._files[run]
