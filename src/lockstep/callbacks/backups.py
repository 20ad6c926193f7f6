"""Backups: Keras's `BackupAndRestore` as one of Lockstep's callbacks.

Keras saves the weights, the optimizer and the epoch's number. Beside that number goes what
makes the run exact: its steps, epochs, seed, shards and threads, as a checkpoint holds them.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.callbacks.files import replace
from lockstep.callbacks.keras_adapter import KerasCallback, is_guest
from lockstep.errors import CallbackError, ExactError, ModelError
from lockstep.training.run_state import Run

OWN = "lockstep"  # the key of the run's numbers in Keras's file


@dataclasses.dataclass(frozen=True)
class Restored:
    """Where a run stood when its backup was made."""

    epochs: int
    run: Run | None  # of a backup that plain Keras made there is none

    def take_over(self, trainer: Any, steps_per_epoch: int | None) -> bool:
        """Gives the trainer's run the backup's numbers; tells whether these put its data into another order."""
        run, seed = trainer.session.run, trainer.session.run.seed
        made = {"epoch": run.epoch + self.epochs, "step": run.step + self.epochs * (steps_per_epoch or 0)}
        run.take_over(self.run or dataclasses.replace(run, **made))
        trainer.session.reset_opening()
        trainer.session.resumed = f"resumed from a backup at the beginning of epoch {self.epochs + 1}"
        return bool(run.seed != seed)


class Backup(KerasCallback):
    """One `BackupAndRestore`, known by the attributes that Keras gives it."""

    found: Restored | None = None

    @property
    def folder(self) -> str:
        """The folder, as it was given."""
        return str(self.callback.backup_dir)

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        """Lets Keras load the backup, where there is one that fits this run, and keeps what it says."""
        model = self.trainer.model
        if not model.built:
            raise ModelError(
                f"BackupAndRestore needs a model that has its variables. Got {model.name!r}, which waits for its "
                "first batch. Begin it with keras.Input(shape), or call it on an example before lockstep.wrap: "
                "model(x[:1])."
            )
        numbers = self._read().get(OWN)
        saved = Run.from_saved(numbers) if isinstance(numbers, dict) else None
        if saved is not None:  # before Keras writes anything into the model
            self.trainer.session.run.check(saved, self.trainer.exact, len(self.trainer.devices))
        model._initial_epoch = None  # Keras itself never takes it back, and a later fit would skip epochs
        super().on_train_begin(logs)
        epochs, model._initial_epoch = model._initial_epoch, None
        self.found = Restored(int(epochs), saved) if epochs else None

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        """Lets Keras save, and puts the run's numbers beside the epoch's."""
        super().on_epoch_end(epoch, logs)
        written = self._read()
        if written.get("epoch") == epoch + 1:
            replace(self._file, json.dumps({**written, OWN: self.trainer.session.run.state()}).encode())

    @property
    def _file(self) -> Path:
        return Path(self.callback._training_metadata_path)

    def _read(self) -> dict[str, Any]:
        """What Keras's file says; nothing where there is none in reach (it may lie in a cloud)."""
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
    """Refuses a backup beside a checkpoint, and one in the middle of an epoch where bits must be equal."""
    for backup in (callback for callback in callbacks if isinstance(callback, Backup)):
        if checkpoint is not None:
            raise CallbackError(
                f"One of them restores a run. Got BackupAndRestore({backup.folder!r}) and checkpoint={checkpoint!r}. "
                "Leave BackupAndRestore out."
            )
        frequency = backup.callback.save_freq
        if exact and frequency != "epoch":
            raise ExactError(
                "A run goes on exactly from the end of an epoch: after a backup inside one Keras makes the whole "
                f"epoch again. Got BackupAndRestore(save_freq={frequency!r}). Use save_freq='epoch'; or leave it out "
                f"and use fit(checkpoint=lockstep.Checkpoint({backup.folder!r}, every={max(int(frequency), 1)})), "
                "which goes on at the step; or exact=False."
            )


def adapted(callback: Any) -> Any:
    """A Keras callback as one of Lockstep's; anything else as it is."""
    if not is_guest(callback):
        return callback
    return Backup(callback) if is_backup(callback) else KerasCallback(callback)
