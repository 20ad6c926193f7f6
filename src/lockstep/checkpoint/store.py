"""A folder of checkpoints named by step; the newest and the best are kept.

`step-00000100` is whole as soon as it has that name. `best` is a link to the best one. What
else is in the folder is left alone.
"""

import inspect
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint import lock
from lockstep.checkpoint.atomic_folder import discard, dotted, is_ours, located, make, names, sweep
from lockstep.checkpoint.format import Snapshot, facts_of, read, write
from lockstep.checkpoint.io import MANIFEST, saving, sync
from lockstep.core.arguments import check_path
from lockstep.core.monitor import Monitor
from lockstep.errors import CheckpointError, SaveError

BEST = "best"
_STEP = re.compile(r"step-(\d{8,18})")
_HOME = str(Path(__file__).parents[1]) + os.sep


class Found(NamedTuple):
    """The newest whole checkpoint and where it is, if there is one, and what is wrong with each newer one."""

    whole: tuple[Path, Snapshot] | None
    skipped: tuple[tuple[Path, str], ...] = ()

    def told(self) -> tuple[Path, Snapshot] | None:
        """The whole one; warns of those that were passed over for it."""
        for _, reason in self.skipped:
            warnings.warn(f"Passed over a newer checkpoint. {reason}", stacklevel=_script())
        return self.whole


class Store:
    """The checkpoints in a folder; after each save the `keep` newest stay and the best, `keep=None` all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home:
    ...     store = Store(home, keep=2)
    ...     for step in (100, 200, 300):
    ...         path = store.save(Snapshot({}, {"lr": 0.1}), step)
    ...     path.name, store.steps(), store.newest().whole[1].facts
    ('step-00000300', [200, 300], {'lr': 0.1})
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 3, best: str | Monitor | None = None) -> None:
        self.folder = Path(os.path.abspath(check_path("path", folder, CheckpointError, "ckpt/")))
        self._keep = keep
        self._best = Monitor(best) if isinstance(best, str) else best
        self._values: dict[int, float] = {}  # of the checkpoints seen so far

    def save(self, snapshot: Snapshot, step: int) -> Path:
        """Writes a checkpoint, then lets go of older ones; gives its path."""
        with saving(self.folder):
            make(self.folder)
            with lock.held(self.folder / ".lock") as mine:
                if not mine:
                    raise SaveError(
                        f"One process at a time saves to a folder. Got {self.folder}, to which another is saving now. "
                        "Give each run a folder of its own."
                    )
                sweep(self.folder)
                path = write(self.path(step), snapshot)
                self._values.pop(step, None)
                best = self._point() if self._best else None
                self._let_go({step, best})
        return path

    def newest(self) -> Found:
        """The newest checkpoint that is whole, verified. Where there are some and none is, the error lists them."""
        while True:
            steps = self.steps()
            skipped: list[tuple[Path, str]] = []
            for path in map(self.path, reversed(steps)):
                try:
                    return Found((path, read(path)), tuple(skipped))
                except CheckpointError as error:
                    skipped.append((path, str(error)))
            if steps == self.steps():  # else another process saved one and let these go
                break
        if skipped:
            raise CheckpointError(
                f"A run goes on from a whole checkpoint. Got {self.folder}, in which none is:\n  "
                + "\n  ".join(reason for _, reason in skipped)
                + "\nBring one of them again, or start anew in another folder."
            )
        return Found(None)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order, whole or not."""
        try:
            return self._steps()
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints are looked for in a folder. Got {self.folder}: {error.strerror}. Give another path."
            ) from error

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:08}"

    def _steps(self) -> list[int]:
        try:
            found = names(self.folder)
        except FileNotFoundError:
            return []
        steps = [int(match[1]) for match in map(_STEP.fullmatch, found) if match]
        return sorted(step for step in set(steps) if self.path(step).name in found)

    def _point(self) -> int | None:
        """Leads the link to the best checkpoint, and gives that one's step."""
        best = self._best_step()
        link = self.folder / BEST
        if best is not None and (not link.is_symlink() or os.readlink(link) != self.path(best).name):
            if os.path.lexists(link) and not link.is_symlink():
                raise SaveError(f"The name {BEST!r} is for a link. Got {link}, which is something else. Move it away.")
            fresh = dotted(link, "writing")
            os.symlink(self.path(best).name, fresh)
            try:
                os.rename(fresh, link)
            except BaseException:
                fresh.unlink()
                raise
            sync(self.folder)
        return best

    def _best_step(self) -> int | None:
        assert self._best is not None
        best = None
        steps = self._steps()
        self._values = {step: self._values[step] if step in self._values else self._value(step) for step in steps}
        for step, value in self._values.items():
            if self._best.is_better(value, than=None if best is None else self._values[best]):
                best = step
        return best

    def _value(self, step: int) -> float:
        """The watched value of a checkpoint; NaN where it has none."""
        assert self._best is not None
        try:
            logs: Any = facts_of(self.path(step), "logs")
            return float(logs[self._best.name])
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None  # it may be the best, for all that can be read
            return math.nan
        except (KeyError, TypeError, ValueError, OverflowError):
            return math.nan

    def _let_go(self, keep: set[int | None]) -> None:
        """Removes all but the newest and those to keep. One with files of somebody else's in it stays too."""
        if self._keep is not None:
            for step in self._steps()[: -self._keep]:
                if step not in keep and is_ours(self.path(step)):
                    discard(self.path(step))


def find(path: str | os.PathLike[str]) -> Snapshot:
    """Reads a checkpoint, or the newest whole one in a folder of checkpoints, and warns of those it passed over."""
    store = Store(path)
    if (located(store.folder) / MANIFEST).exists() or not store.steps():
        return read(path)
    whole = store.newest().told()
    return whole[1] if whole else read(path)


def _script() -> int:
    """The `stacklevel` of a warning, from the function that warns, that names the script's line and none of ours."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_HOME):
        frame, level = frame.f_back, level + 1
    return level
