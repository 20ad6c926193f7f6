"""A folder of checkpoints named by step, of which the newest and the best are kept.

`step-00000100` is complete as soon as it has that name. `best` is a link to the best one. Other files in the folder are
not touched.
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
    """The newest undamaged checkpoint and its path, if there is one, and what is wrong with each newer one."""

    whole: tuple[Path, Snapshot] | None
    skipped: tuple[tuple[Path, str], ...] = ()

    def warn_and_get(self) -> tuple[Path, Snapshot] | None:
        """Warn of the newer checkpoints that are damaged, then return the undamaged one."""
        for _, reason in self.skipped:
            warnings.warn(f"A newer checkpoint was skipped. {reason}", stacklevel=_find_script_level())
        return self.whole


class Store:
    """The checkpoints in a folder; after each save the `keep` newest are kept, and the best, all if `keep=None`.

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
        self._values: dict[int, float] = {}  # the monitored value of the checkpoints seen so far, by step

    def save(self, snapshot: Snapshot, step: int) -> Path:
        """Write a checkpoint, then remove those that are not to be kept; return its path."""
        with raise_save_errors(self.folder):
            make_folder(self.folder)
            with hold_lock(self.folder / ".lock") as is_locked:
                if not is_locked:
                    raise SaveError(
                        f"Another process is saving to {self.folder}. Use a folder of its own for each run."
                    )
                remove_leftovers(self.folder)
                path = write(self.path(step), snapshot)
                self._values.pop(step, None)
                best = self._update_best_link() if self._best else None
                self._remove_old({step, best})
        return path

    def newest(self) -> Newest:
        """Read and verify the newest undamaged checkpoint; raise if there are checkpoints and all are damaged."""
        while True:
            steps = self.steps()
            skipped: list[tuple[Path, str]] = []
            for path in map(self.path, reversed(steps)):
                try:
                    return Newest((path, read(path)), tuple(skipped))
                except CheckpointError as error:
                    skipped.append((path, str(error)))
            if steps == self.steps():  # else another process has saved one and removed these
                break
        if skipped:
            raise CheckpointError(
                f"All checkpoints in {self.folder} are damaged:\n  "
                + "\n  ".join(reason for _, reason in skipped)
                + "\nRestore one from a backup, or use another folder to begin a new run."
            )
        return Newest(None)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in ascending order, damaged ones too."""
        try:
            return self._list_steps()
        except OSError as error:
            raise CheckpointError(
                f"The checkpoints in {self.folder} cannot be listed: {error.strerror}. Use the path of a folder."
            ) from error

    def path(self, step: int) -> Path:
        """The path of the checkpoint of a step, whether it exists or not."""
        return self.folder / f"step-{step:08}"

    def _list_steps(self) -> list[int]:
        try:
            names = list_names(self.folder)
        except FileNotFoundError:
            return []
        steps = [int(match[1]) for match in map(_STEP.fullmatch, names) if match]
        return sorted(step for step in set(steps) if self.path(step).name in names)

    def _update_best_link(self) -> int | None:
        """Let the link `best` lead to the best checkpoint; return the step of that one."""
        best = self._find_best()
        link = self.folder / BEST
        if best is not None and (not link.is_symlink() or os.readlink(link) != self.path(best).name):
            if os.path.lexists(link) and not link.is_symlink():
                raise SaveError(f"{link} must be a link to the best checkpoint, and is something else. Rename it.")
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
        """The monitored value of a checkpoint; NaN if it has none."""
        assert self._best is not None
        try:
            logs: Any = read_fact(self.path(step), "logs")
            return float(logs[self._best.name])
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None  # it cannot be read now, so it may be the best
            return math.nan
        except (KeyError, TypeError, ValueError, OverflowError):
            return math.nan

    def _remove_old(self, keep: set[int | None]) -> None:
        """Remove all but the newest and those to keep. A folder with files that are not a checkpoint's stays too."""
        if self._keep is not None:
            for step in self._list_steps()[: -self._keep]:
                if step not in keep and is_checkpoint_folder(self.path(step)):
                    discard(self.path(step))


def read_newest(path: str | os.PathLike[str]) -> Snapshot:
    """Read a checkpoint, or the newest undamaged one in a folder of them; warn of newer ones that are damaged."""
    store = Store(path)
    if (find_folder(store.folder) / MANIFEST).exists() or not store.steps():
        return read(path)
    whole = store.newest().warn_and_get()
    return whole[1] if whole else read(path)


def load_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Load the arrays of a checkpoint, or of the newest one in a folder of checkpoints, as numpy, without a framework.

    The model's arrays have the framework's own names, the names of others begin with `optimizer.` and the like. Every
    byte is verified. bfloat16, which numpy does not have, comes as float32.

    >>> import tempfile, numpy as np
    >>> from lockstep.backends.base import Array
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
                f"Two arrays of {path} have the name {bare!r}. Read its .safetensors files with safetensors instead."
            )
        result[bare] = widen(data, dtype) if dtype == "bfloat16" else data
    return result


def _find_script_level() -> int:
    """The `stacklevel` with which a warning names the first line outside of Lockstep that led to it."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
