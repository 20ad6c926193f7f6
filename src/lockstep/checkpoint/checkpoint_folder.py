"""A folder of checkpoints named by step, in which the newest checkpoints and the best checkpoint are kept.

A checkpoint is complete as soon as it has its name, such as `step-00000100`. `best` is a link to the best checkpoint.
Other files in the folder are never changed.
"""

import inspect
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from lockstep.checkpoint.atomic_folder import (
    discard,
    find_folder,
    is_checkpoint_folder,
    list_names,
    make_dot_name,
    make_folder,
    remove_leftovers,
)
from lockstep.checkpoint.format import Snapshot, read, read_fact, write
from lockstep.checkpoint.io import MANIFEST, raise_save_errors
from lockstep.core.arguments import check_path
from lockstep.core.atomic_file import sync_folder
from lockstep.core.file_lock import hold_lock
from lockstep.core.low_precision import widen
from lockstep.core.monitor import Monitor
from lockstep.errors import CheckpointError, SaveError, StateError

BEST = "best"
_STEP = re.compile(r"step-(\d{8,18})")
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class Newest(NamedTuple):
    """The newest undamaged checkpoint with its path, and the errors of newer checkpoints, which are damaged."""

    whole: tuple[Path, Snapshot] | None
    skipped: tuple[tuple[Path, str], ...] = ()

    def warn_and_get(self) -> tuple[Path, Snapshot] | None:
        """Warns of each newer checkpoint that is damaged, and returns the undamaged checkpoint with its path."""
        for _, reason in self.skipped:
            warnings.warn(f"A newer checkpoint was skipped. {reason}", stacklevel=_find_script_level())
        return self.whole


class CheckpointFolder:
    """The checkpoints in a folder. After each save, all but the `keep` newest checkpoints and the best are removed.

    With `keep=None` all checkpoints are kept. `best` is the metric that decides which checkpoint is best.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home:
    ...     store = CheckpointFolder(home, keep=2)
    ...     for step in (100, 200, 300):
    ...         path = store.save(Snapshot({}, {"lr": 0.1}), step)
    ...     path.name, store.steps(), store.newest().whole[1].facts
    ('step-00000300', [200, 300], {'lr': 0.1})
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 3, best: str | Monitor | None = None) -> None:
        self.folder = Path(os.path.abspath(check_path("path", folder, CheckpointError, "ckpt/")))
        self._keep = keep
        self._best = Monitor(best) if isinstance(best, str) else best
        self._values: dict[int, float] = {}  # the monitored value of the checkpoints seen so far, by step

    def save(self, snapshot: Snapshot, step: int) -> Path:
        """Writes a checkpoint and returns its path; removes the older checkpoints that are not to be kept."""
        with raise_save_errors(self.folder):
            make_folder(self.folder)
            with hold_lock(self.folder / ".lock") as is_locked:
                if not is_locked:
                    raise SaveError(
                        f"Another process is saving checkpoints to {self.folder}. Use a separate folder for each run."
                    )
                remove_leftovers(self.folder)
                path = write(self.path(step), snapshot)
                self._values.pop(step, None)
                best = self._update_best_link() if self._best else None
                self._remove_old({step, best})
        return path

    def newest(self) -> Newest:
        """Returns the newest undamaged checkpoint; raises CheckpointError if all checkpoints are damaged."""
        while True:
            steps = self.steps()
            skipped: list[tuple[Path, str]] = []
            for path in map(self.path, reversed(steps)):
                try:
                    return Newest((path, read(path)), tuple(skipped))
                except CheckpointError as error:
                    skipped.append((path, str(error)))
            if steps == self.steps():  # otherwise another process has saved a checkpoint and removed some of these
                break
        if skipped:
            raise CheckpointError(
                f"All checkpoints in {self.folder} are damaged:\n  "
                + "\n  ".join(reason for _, reason in skipped)
                + "\nRestore a checkpoint from a backup, or use another folder to begin a new run."
            )
        return Newest(None)

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints in the folder in ascending order, including damaged checkpoints."""
        try:
            return self._list_steps()
        except OSError as error:
            raise CheckpointError(
                f"The checkpoints in {self.folder} cannot be listed: {error.strerror or error}. Use the path of a "
                "folder that this process may read."
            ) from error

    def path(self, step: int) -> Path:
        """Returns the path that the checkpoint of this step has or would have."""
        return self.folder / f"step-{step:08}"

    def _list_steps(self) -> list[int]:
        try:
            names = list_names(self.folder)
        except FileNotFoundError:
            return []
        steps = [int(match[1]) for match in map(_STEP.fullmatch, names) if match]
        return sorted(step for step in set(steps) if self.path(step).name in names)

    def _update_best_link(self) -> int | None:
        """Points the link `best` at the best checkpoint; returns the step of that checkpoint."""
        best = self._find_best()
        link = self.folder / BEST
        if best is not None and (not link.is_symlink() or os.readlink(link) != self.path(best).name):
            if os.path.lexists(link) and not link.is_symlink():
                raise SaveError(
                    f"The link to the best checkpoint cannot be created, because {link} exists and is not a link. "
                    f"Rename or remove {link}, or use another folder."
                )
            new = make_dot_name(link, "writing")
            os.symlink(self.path(best).name, new)
            try:
                os.rename(new, link)
            except BaseException:
                new.unlink()
                raise
            sync_folder(self.folder)
        return best

    def _find_best(self) -> int | None:
        assert self._best is not None
        best = None
        steps = self._list_steps()
        self._values = {step: self._values[step] if step in self._values else self._read_value(step) for step in steps}
        for step, value in self._values.items():
            if self._best.is_better(value, than=None if best is None else self._values[best]):
                best = step
        return best

    def _read_value(self, step: int) -> float:
        """Returns the value of the monitored metric in a checkpoint; NaN if the checkpoint has no such value."""
        assert self._best is not None
        try:
            logs: Any = read_fact(self.path(step), "logs")
            return float(logs[self._best.name])
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None  # the checkpoint cannot be read now, so it may be the best
            return math.nan
        except (KeyError, TypeError, ValueError, OverflowError):
            return math.nan

    def _remove_old(self, keep: set[int | None]) -> None:
        """Removes all checkpoints except the newest and those in `keep`; never a folder that contains other files."""
        if self._keep is not None:
            for step in self._list_steps()[: -self._keep]:
                if step not in keep and is_checkpoint_folder(self.path(step)):
                    discard(self.path(step))


def read_newest(path: str | os.PathLike[str]) -> Snapshot:
    """Returns the checkpoint at `path`; if `path` is a folder of checkpoints, the newest that is undamaged.

    Warns of newer checkpoints that are damaged.
    """
    store = CheckpointFolder(path)
    if (find_folder(store.folder) / MANIFEST).exists() or not store.steps():
        return read(path)
    whole = store.newest().warn_and_get()
    return whole[1] if whole else read(path)


def load_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a checkpoint by name, as numpy arrays, without importing a framework.

    `path` is a checkpoint, or a folder of checkpoints, of which the newest undamaged checkpoint is read. The model's
    arrays have the framework's own names; the names of all other arrays have a prefix such as `optimizer.`. Arrays of
    bfloat16 are returned as float32, because numpy has no bfloat16. Every byte is verified. Raises `CheckpointError` if
    there is no undamaged checkpoint.

    >>> import tempfile, numpy as np
    >>> from lockstep.core.types import Array
    >>> state = {"model.w": Array(np.zeros(2), "float64"), "optimizer.w.step": Array(np.asarray(3), "python")}
    >>> with tempfile.TemporaryDirectory() as home:
    ...     load_arrays(write(home + "/mine", Snapshot(state)))
    {'w': array([0., 0.]), 'optimizer.w.step': array(3)}
    """
    result = {}
    for name, (data, dtype) in read_newest(path).state.items():
        bare = name.removeprefix("model.")
        if bare in result:
            raise StateError(
                f"Two arrays of the checkpoint {path} have the name {bare!r}. Read the checkpoint's .safetensors files "
                "with the package safetensors instead."
            )
        result[bare] = widen(data, dtype) if dtype == "bfloat16" else data
    return result


def _find_script_level() -> int:
    """Returns the `stacklevel` with which a warning names the line of the script that called Lockstep."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
