"""Runs Keras's `BackupAndRestore` as a callback of Lockstep, which also saves and restores Lockstep's run.

Keras saves the weights, the optimizer and the number of epochs. Lockstep adds the steps, epochs, seed, shards and
threads of the run to the JSON file in which Keras saves the number of epochs.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.callbacks.keras_adapter import KerasCallback, is_keras_callback
from lockstep.core.atomic_file import replace_file
from lockstep.core.run_state import Run
from lockstep.errors import CallbackError, ExactError, ModelError

RUN_KEY = "lockstep"  # the key of Lockstep's run in the JSON file


@dataclasses.dataclass(frozen=True)
class Restored:
    """The number of finished epochs in a backup, and the run that saved the backup."""

    epochs: int
    run: Run | None  # None for a backup that Keras made without Lockstep

    def take_over(self, trainer: Any, steps_per_epoch: int | None) -> bool:
        """Copies the backup's seed, shards and counts to the trainer's run; returns whether the seed has changed."""
        session = trainer.session
        run, seed = session.run, session.run.seed
        counts = {"epoch": run.epoch + self.epochs, "step": run.step + self.epochs * (steps_per_epoch or 0)}
        run.take_over(self.run or dataclasses.replace(run, **counts))
        session.resumed = f"resumed from a backup at the beginning of epoch {self.epochs + 1}"
        session.continue_run()
        return bool(run.seed != seed)


class Backup(KerasCallback):
    """A Keras callback `BackupAndRestore`, which also saves and restores Lockstep's run."""

    found: Restored | None = None

    @property
    def folder(self) -> str:
        """The path of the backup's folder, as it was given to BackupAndRestore."""
        return str(self.callback.backup_dir)

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        """Lets Keras restore the backup if there is one, and stores what was restored in `found`.

        Raises before Keras changes the model if the backup does not fit this run.
        """
        model = self.trainer.model
        if not model.built:
            raise ModelError(
                "BackupAndRestore needs a model whose variables exist, but the model "
                f"{model.name!r} creates its variables at its first batch. Begin the model with keras.Input(shape), or "
                "call the model on an example before lockstep.wrap: model(x[:1])."
            )
        numbers = self._read().get(RUN_KEY)
        saved = Run.from_saved(numbers) if isinstance(numbers, dict) else None
        if saved is not None:  # checked before Keras changes the model
            self.trainer.session.run.check(saved, self.trainer.exact, self.trainer.session.min_shards)
        model._initial_epoch = None  # Keras itself never resets it, and a later fit would skip epochs
        super().on_train_begin(logs)
        epochs, model._initial_epoch = model._initial_epoch, None
        self.found = Restored(int(epochs), saved) if epochs else None

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        """Lets Keras save the backup, then adds the state of Lockstep's run to the backup's JSON file."""
        super().on_epoch_end(epoch, logs)
        written = self._read()
        if written.get("epoch") == epoch + 1:
            replace_file(self._file, json.dumps({**written, RUN_KEY: self.trainer.session.run.state()}).encode())

    @property
    def _file(self) -> Path:
        return Path(self.callback._training_metadata_path)

    def _read(self) -> dict[str, Any]:
        """Returns the content of the backup's JSON file; empty if the file cannot be read, as on cloud storage."""
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def is_backup(callback: Any) -> bool:
    """Returns whether `callback` is a `BackupAndRestore` of Keras.

    >>> is_backup(Callback())
    False
    """
    return all(hasattr(callback, name) for name in ("backup_dir", "save_freq", "_training_metadata_path"))


def check_backups(callbacks: Iterable[Callback], checkpoint: Any, exact: bool) -> None:
    """Raises if BackupAndRestore is used together with `checkpoint=`, or saves inside an epoch of an exact run."""
    for backup in (callback for callback in callbacks if isinstance(callback, Backup)):
        if checkpoint is not None:
            raise CallbackError(
                f"BackupAndRestore({backup.folder!r}) cannot be used together with checkpoint={checkpoint!r}, because "
                "both restore the run. Leave BackupAndRestore out."
            )
        frequency = backup.callback.save_freq
        if exact and frequency != "epoch":
            raise ExactError(
                f"BackupAndRestore(save_freq={frequency!r}) saves inside an epoch, and Keras then repeats the whole "
                "epoch, so an exact run would not give the same bits. Use save_freq='epoch'; or "
                f"fit(checkpoint=lockstep.Checkpoint({backup.folder!r}, every={max(int(frequency), 1)})) instead of "
                "BackupAndRestore, which continues at the step; or exact=False."
            )


def adapt_callback(callback: Any) -> Any:
    """Returns a Keras callback wrapped as a callback of Lockstep; any other object unchanged."""
    if not is_keras_callback(callback):
        return callback
    return Backup(callback) if is_backup(callback) else KerasCallback(callback)
