"""Keras's `BackupAndRestore` as one of Lockstep's callbacks.

Keras saves the weights, the optimizer and the number of epochs. Beside that number, in the same JSON file, goes what
makes the run exact: its steps, epochs, seed, shards and threads, as in a checkpoint.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.callbacks.keras_adapter import KerasCallback, is_keras_callback
from lockstep.core.atomic_file import replace_file
from lockstep.errors import CallbackError, ExactError, ModelError
from lockstep.training.run_state import Run

RUN_KEY = "lockstep"  # of the run's numbers in Keras's file


@dataclasses.dataclass(frozen=True)
class Restored:
    """The number of epochs in a backup, and the run it was made in."""

    epochs: int
    run: Run | None  # None for a backup that Keras made without Lockstep

    def take_over(self, trainer: Any, steps_per_epoch: int | None) -> bool:
        """Give the trainer's run the numbers of the backup; return whether its data is now read in another order."""
        run, seed = trainer.session.run, trainer.session.run.seed
        counts = {"epoch": run.epoch + self.epochs, "step": run.step + self.epochs * (steps_per_epoch or 0)}
        run.take_over(self.run or dataclasses.replace(run, **counts))
        trainer.session.reset_opening()
        trainer.session.resumed = f"resumed from a backup at the beginning of epoch {self.epochs + 1}"
        return bool(run.seed != seed)


class Backup(KerasCallback):
    """One `BackupAndRestore`, recognized by the attributes that Keras gives it."""

    found: Restored | None = None

    @property
    def folder(self) -> str:
        """The folder, as it was given."""
        return str(self.callback.backup_dir)

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        """Let Keras load the backup if there is one that fits this run, and store its numbers in `found`."""
        model = self.trainer.model
        if not model.built:
            raise ModelError(
                f"BackupAndRestore needs a model that has its variables, and {model.name!r} creates them at its first "
                "batch. Begin the model with keras.Input(shape), or call it on an example before lockstep.wrap: "
                "model(x[:1])."
            )
        numbers = self._read().get(RUN_KEY)
        saved = Run.from_saved(numbers) if isinstance(numbers, dict) else None
        if saved is not None:  # before Keras writes anything into the model
            self.trainer.session.run.check(saved, self.trainer.exact, len(self.trainer.devices))
        model._initial_epoch = None  # Keras itself never resets it, and a later fit would skip epochs
        super().on_train_begin(logs)
        epochs, model._initial_epoch = model._initial_epoch, None
        self.found = Restored(int(epochs), saved) if epochs else None

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        """Let Keras save, then add the run's numbers to its file."""
        super().on_epoch_end(epoch, logs)
        written = self._read()
        if written.get("epoch") == epoch + 1:
            replace_file(self._file, json.dumps({**written, RUN_KEY: self.trainer.session.run.state()}).encode())

    @property
    def _file(self) -> Path:
        return Path(self.callback._training_metadata_path)

    def _read(self) -> dict[str, Any]:
        """The content of Keras's file; empty if it cannot be read here, as on cloud storage."""
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def is_backup(callback: Any) -> bool:
    """Whether this is a `BackupAndRestore`.

    >>> is_backup(Callback())
    False
    """
    return all(hasattr(callback, name) for name in ("backup_dir", "save_freq", "_training_metadata_path"))


def check_backups(callbacks: Iterable[Callback], checkpoint: Any, exact: bool) -> None:
    """Refuse a backup together with a checkpoint, and, in an exact run, one in the middle of an epoch."""
    for backup in (callback for callback in callbacks if isinstance(callback, Backup)):
        if checkpoint is not None:
            raise CallbackError(
                f"fit() can restore a run from one place, and got BackupAndRestore({backup.folder!r}) and "
                f"checkpoint={checkpoint!r}. Leave BackupAndRestore out."
            )
        frequency = backup.callback.save_freq
        if exact and frequency != "epoch":
            raise ExactError(
                f"BackupAndRestore(save_freq={frequency!r}) saves inside an epoch, and Keras then repeats the whole "
                "epoch, which an exact run must not. Use save_freq='epoch'; or leave it out and use "
                f"fit(checkpoint=lockstep.Checkpoint({backup.folder!r}, every={max(int(frequency), 1)})), "
                "which continues at the step; or exact=False."
            )


def adapt_callback(callback: Any) -> Any:
    """Wrap a Keras callback as one of Lockstep's; return anything else as it is."""
    if not is_keras_callback(callback):
        return callback
    return Backup(callback) if is_backup(callback) else KerasCallback(callback)
