"""When a fit is saved, and of which moment: the copy is made between two steps, and another thread writes it."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import Any

from lockstep.checkpoint.background_writer import Writer
from lockstep.checkpoint.config import Checkpoint
from lockstep.checkpoint.format import Snapshot
from lockstep.checkpoint.store import Store
from lockstep.training.run_state import Run

Take = Callable[[], Snapshot]


class Autosave:
    """The store of one `fit`, and when to save into it.

    Of processes that were launched together only the first writes.
    """

    def __init__(self, checkpoint: str | PathLike[str] | Checkpoint, writes: bool) -> None:
        self.checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        self._monitor = self.checkpoint.monitor
        self._store = Store(self.checkpoint.path, self.checkpoint.keep, self._monitor)
        self.writes = writes
        self._writer = Writer()
        self._best: float | None = None  # so far

    @property
    def folder(self) -> str:
        """The folder, as it was given."""
        return os.fspath(self.checkpoint.path)

    def newest(self) -> tuple[str, Snapshot] | None:
        """Return the newest whole checkpoint and its name, if there is one; warn of those that are passed over."""
        found = self._store.newest().warn_and_get()
        return None if found is None else (os.path.join(self.folder, found[0].name), found[1])

    def after_step(self, step: int, take: Take) -> None:
        """Save if that is due after so many steps; raise what went wrong in an earlier save."""
        self._writer.check()
        if isinstance(self.checkpoint.every, int) and step % self.checkpoint.every == 0:
            self.save(step, take)

    def after_epoch(self, step: int, last: bool, logs: Mapping[str, float], validated: bool, take: Take) -> None:
        """Save if that is due after an epoch: the last one always, and every one if the best is to stay."""
        improved = False
        if self._monitor is not None and (value := self._monitor.value(logs, validated)) is not None:
            improved = self._monitor.is_better(value, self._best)
            self._best = value if improved else self._best
        if last or self._monitor is not None or self.checkpoint.every == "epoch":
            self.save(step, take, keep=improved)
        else:
            self.after_step(step, take)

    def save(self, step: int, take: Take, keep: bool = False) -> None:
        """Copy the state and have it written; if the disk is slow, a newer copy takes its place unless it is kept."""
        if self.writes:
            copy = take().freeze()
            self._writer.submit(lambda: self._store.save(copy, step), keep)

    def finish(self) -> None:
        """Return when everything is written; raise what went wrong."""
        self._writer.wait()

    def __enter__(self) -> "Autosave":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for what is being written; raise what went wrong, if nothing else has."""
        self._writer.__exit__(kind, error, traceback)


class Beginning:
    """The state before a run's first step, saved when the first batch has decided the number of shards.

    Without it, a run that fails before its first checkpoint leaves a trained model in the trainer and nothing to go
    back to. It waits for the first batch because a resumed run keeps its shards, and their number may follow from the
    batch and the number of devices.
    """

    def __init__(self, autosave: Autosave, take: Take, has_state: bool) -> None:
        self._autosave = autosave
        self._take = take
        self.has_state = has_state  # a model may have none before its first batch
        self._snapshot = self._copy() if has_state else None

    def save(self, run: Run) -> None:
        """Save the state, with the run's number of shards and threads; a model that had no state has one by now."""
        snapshot = self._snapshot or self._copy()
        if snapshot is not None:
            decided = {"shards": run.shards, "threads": run.threads}
            self._autosave.save(run.step, lambda: replace(snapshot, facts={**snapshot.facts, **decided}))

    def _copy(self) -> Snapshot | None:
        return self._take().freeze() if self._autosave.writes else None


def starts_anew(saved: Snapshot, run: Run, batch_size: Any, num_devices: int) -> bool:
    """Return whether nothing was trained since the saved beginning, neither there nor in this run.

    Then the script's own weights, rates and data count, which may have been changed after an early failure. Only the
    shards and threads that followed from the batch and the host are the saved ones, so that the run made again
    elsewhere gives the same bits.
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
    """Tell the user at the terminal, whatever `verbose` is."""
    print(text, file=sys.stderr, flush=True)
