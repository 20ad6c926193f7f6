"""Saves checkpoints during a `fit`. The state is copied between two steps and written by another thread."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import Any

from lockstep.checkpoint.background_writer import Writer
from lockstep.checkpoint.checkpoint_folder import CheckpointFolder
from lockstep.checkpoint.format import Snapshot
from lockstep.checkpoint.save_options import Checkpoint
from lockstep.core.run_state import Run

Take = Callable[[], Snapshot]  # takes a snapshot of the run


class Autosave:
    """Saves the checkpoints of one `fit` when they are due.

    `writes` is False in all processes of a launched run except the first, which writes the checkpoints.
    """

    def __init__(self, checkpoint: str | PathLike[str] | Checkpoint, writes: bool) -> None:
        self.checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        self._monitor = self.checkpoint.monitor
        self._store = CheckpointFolder(self.checkpoint.path, self.checkpoint.keep, self._monitor)
        self.writes = writes
        self._writer = Writer()
        self.num_saves = 0
        self._best: float | None = None  # the best value of the monitored metric so far

    @property
    def folder(self) -> str:
        """The path of the checkpoints' folder, as it was given to `fit`."""
        return os.fspath(self.checkpoint.path)

    def newest(self) -> tuple[str, Snapshot] | None:
        """Returns the name and the content of the newest undamaged checkpoint; None if there is no checkpoint.

        Warns of newer checkpoints that are damaged.
        """
        found = self._store.newest().warn_and_get()
        return None if found is None else (os.path.join(self.folder, found[0].name), found[1])

    def after_step(self, step: int, take: Take) -> None:
        """Saves a checkpoint if one is due after this step; raises if an earlier save has failed."""
        self._writer.check()
        if isinstance(self.checkpoint.every, int) and step % self.checkpoint.every == 0:
            self.save(step, take)

    def after_epoch(self, step: int, last: bool, logs: Mapping[str, float], validated: bool, take: Take) -> None:
        """Saves a checkpoint after an epoch if one is due: after the last epoch, and always if the best is kept."""
        improved = False
        if self._monitor is not None and (value := self._monitor.value(logs, validated)) is not None:
            improved = self._monitor.is_better(value, self._best)
            self._best = value if improved else self._best
        if last or self._monitor is not None or self.checkpoint.every == "epoch":
            self.save(step, take, keep=improved)
        else:
            self.after_step(step, take)

    def save(self, step: int, take: Take, keep: bool = False) -> None:
        """Copies the state and writes the copy in the background.

        A newer copy replaces this copy if it is still waiting to be written, unless `keep` is True.
        """
        if self.writes:
            self.num_saves += 1
            copy = take().freeze()
            self._writer.submit(lambda: self._store.save(copy, step), keep)

    def finish(self) -> None:
        """Waits until all checkpoints are written; raises if a save has failed."""
        self._writer.wait()

    def __enter__(self) -> "Autosave":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits until all checkpoints are written; raises if a save has failed, unless the block has raised."""
        self._writer.__exit__(kind, error, traceback)


class Beginning:
    """The state before the first step of a run, saved as its first checkpoint.

    Without this checkpoint, a run that fails before the first regular checkpoint would leave a partly trained model in
    the trainer, and no saved state from before. The state is saved only after the first batch is known, because the
    checkpoint contains the number of shards, which may depend on the size of the batch.
    """

    def __init__(self, autosave: Autosave, take: Take, has_state: bool) -> None:
        self._autosave = autosave
        self._take = take
        self.has_state = has_state  # False if the model creates its parameters at the first batch
        self._snapshot = self._copy() if has_state else None

    def save(self, run: Run) -> None:
        """Saves the state with the run's numbers of shards and threads, after the first batch has determined these."""
        snapshot = self._snapshot or self._copy()
        if snapshot is not None:
            decided = {"shards": run.shards, "threads": run.threads}
            self._autosave.save(run.step, lambda: replace(snapshot, facts={**snapshot.facts, **decided}))

    def _copy(self) -> Snapshot | None:
        return self._take().freeze() if self._autosave.writes else None


def starts_from_beginning(saved: Snapshot, run: Run, batch_size: Any, num_devices: int) -> bool:
    """Returns whether the newest checkpoint is the one from before the first step, and this run has not trained either.

    If so, the run starts with the script's weights, learning rates and data, because the script may have changed them
    after an early failure. Only numbers of shards and threads that the saved run had chosen itself are copied, so that
    the repeated run gives the same bits on another host.
    """
    facts = saved.facts
    place = facts["fit"]["place"]
    if (place["epoch"], place["batch"]) != (0, 0) or facts.get("step") != run.step:
        return False
    there = Run.from_saved(facts)
    same = facts["fit"]["data"].get("batch_size") == batch_size
    if same and run.shards is None and there.shards is not None and there.shards >= num_devices:
        run.take_over(replace(run, shards=there.shards, threads=there.threads))
    return True


def print_notice(text: str) -> None:
    """Prints a line to stderr, for any value of `verbose`."""
    print(text, file=sys.stderr, flush=True)
