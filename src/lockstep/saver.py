"""The saver: saves a fit as it goes. The copy is made between two steps, the disk is another thread's."""

import os
import sys
from collections.abc import Callable, Mapping
from os import PathLike
from types import TracebackType

from lockstep.checkpoint import Checkpoint, Snapshot, Store, Writer


class Saver:
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
        """The newest whole checkpoint and its name, if there is one; warns of those it passed over."""
        found = self._store.newest().told()
        return None if found is None else (os.path.join(self.folder, found[0].name), found[1])

    def step_made(self, step: int, snapshot: Callable[[], Snapshot]) -> None:
        """Saves where that is due after so many steps; raises what went wrong in an earlier save."""
        self._writer.check()
        if isinstance(self.checkpoint.every, int) and step % self.checkpoint.every == 0:
            self.save(step, snapshot)

    def epoch_made(
        self, step: int, last: bool, logs: Mapping[str, float], validated: bool, snapshot: Callable[[], Snapshot]
    ) -> None:
        """Saves where that is due after an epoch: the last one always, and every one where the best is to stay."""
        improved = False
        if self._monitor is not None and (value := self._monitor.value(logs, validated)) is not None:
            improved = self._monitor.is_better(value, self._best)
            self._best = value if improved else self._best
        if last or self._monitor is not None or self.checkpoint.every == "epoch":
            self.save(step, snapshot, keep=improved)
        else:
            self.step_made(step, snapshot)

    def save(self, step: int, snapshot: Callable[[], Snapshot], keep: bool = False) -> None:
        """Copies the state and has it written; where the disk is slow, a newer one may take its place unless kept."""
        if self.writes:
            copy = snapshot().sealed()
            self._writer.submit(lambda: self._store.save(copy, step), keep)

    def finish(self) -> None:
        """Returns when everything is written; raises what went wrong."""
        self._writer.wait()

    def __enter__(self) -> "Saver":
        """The saver itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for what is being written; raises what went wrong, where nothing else has."""
        self._writer.__exit__(kind, error, traceback)


def say(words: str) -> None:
    """Tells the person at the terminal, whatever `verbose` is."""
    print(words, file=sys.stderr, flush=True)
