"""Folders that appear whole and vanish whole, whenever the process is killed.

A folder is filled under a dot name beside its place, `.step-00000100.<token>.writing`,
and renamed. One that is in the way changes places with it in a single move, or steps
aside as `.….previous` where the file system has no such move; it is found there as long
as its place is empty. One that must go first becomes `.….discarded`. So a name without
a dot is always a whole folder, and what a killed process leaves has a dot.

Whoever fills a folder holds the lock of its manifest, so that nobody sweeps it away.
"""

import ctypes
import errno
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lockstep.checkpoint import lock
from lockstep.checkpoint.io import MANIFEST, NAMES, sync
from lockstep.errors import SaveError

_DOTTED = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?P<role>writing|previous|discarded)", re.DOTALL)
_HERE = -100  # AT_FDCWD: relative to the working directory
_EXCHANGE = 2  # RENAME_EXCHANGE
_NO_SUCH_MOVE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def dotted(target: Path, role: str) -> Path:
    """A fresh dot name beside `target`."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.{role}")


@contextmanager
def filled(target: Path) -> Iterator[Path]:
    """Gives an empty folder that takes the place of `target` when the block ends well, and vanishes when not."""
    make(target.parent)
    sweep(target.parent, target.name)
    _refuse(target)
    with ExitStack() as stack:
        folder = _claim(target, stack)
        try:
            yield folder
            sync(folder)
            _refuse(target)
            _place(folder, target)
        except BaseException:
            remove(folder)
            raise


def make(folder: Path) -> None:
    """Makes a folder and those above it, each on the disk before the next."""
    if not folder.is_dir():
        make(folder.parent)
        with suppress(FileExistsError):
            os.mkdir(folder)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))
        sync(folder.parent)


def located(target: Path) -> Path:
    """Where the folder of this name is: in its place, or aside where a process was killed in mid-move."""
    if not os.path.lexists(target):
        for path, name, role in _leftovers(target.parent):
            if role == "previous" and name == target.name:
                return path
    return target


def names(parent: Path) -> set[str]:
    """The names of what is in a folder, also of what stepped aside and has not come back."""
    aside = {name for _, name, role in _leftovers(parent) if role == "previous"}
    return aside.union(name for name in os.listdir(parent) if not name.startswith("."))


def is_ours(folder: Path) -> bool:
    """Whether this is a real folder that holds nothing but a checkpoint's files."""
    return folder.is_dir() and not folder.is_symlink() and set(os.listdir(folder)) <= set(NAMES)


def discard(folder: Path) -> None:
    """Removes a checkpoint's folder: it has lost its name before it loses a file."""
    gone = dotted(folder, "discarded")
    os.rename(folder, gone)
    remove(gone)


def remove(folder: Path) -> None:
    """Removes a folder with a dot name and the files of a checkpoint in it; what cannot be removed stays."""
    with suppress(OSError):
        for name in reversed(NAMES):  # the manifest, which carries the lock, is the last to go
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def sweep(parent: Path, target: str | None = None) -> None:
    """Clears up what killed processes left of `target`, or of every name, and nobody is at work on."""
    for path, name, role in _leftovers(parent):
        if target not in (None, name):
            continue
        if path.is_symlink():
            path.unlink(missing_ok=True)
        elif role == "previous" and not os.path.lexists(parent / name):
            os.rename(path, parent / name)
        elif role == "writing":
            _remove_dead(path)
        else:
            remove(path)


def _remove_dead(folder: Path) -> None:
    """Removes a folder that no live process fills. One without a manifest is empty: its process begins elsewhere."""
    with suppress(OSError):
        if lock.AVAILABLE and (folder / MANIFEST).exists():
            with lock.held(folder / MANIFEST) as mine:
                if mine:
                    remove(folder)
        elif lock.AVAILABLE:
            folder.rmdir()


def _leftovers(parent: Path) -> list[tuple[Path, str, str]]:
    """(path, name, role) of every dot name of ours."""
    matches = [_DOTTED.fullmatch(name) for name in (os.listdir(parent) if parent.is_dir() else ())]
    return [(parent / match[0], match["name"], match["role"]) for match in matches if match]


def _claim(target: Path, stack: ExitStack) -> Path:
    """A new folder beside the target that nobody sweeps away while the stack is open."""
    for _ in range(10):
        folder = dotted(target, "writing")
        os.mkdir(folder)
        if not lock.AVAILABLE:  # and an open file would keep the folder from being renamed
            return folder
        try:
            if stack.enter_context(lock.held(folder / MANIFEST)):
                return folder
        except FileNotFoundError:  # swept away before it was locked
            continue
        except BaseException:
            remove(folder)
            raise
    raise OSError(errno.EAGAIN, "Folders vanish as soon as they are made", str(target.parent))


def _refuse(target: Path) -> None:
    """Refuses to replace what is not a checkpoint."""
    if os.path.lexists(target) and not is_ours(target):
        what = "a link" if target.is_symlink() else "a folder with other files" if target.is_dir() else "a file"
        raise SaveError(
            f"A checkpoint takes a new name or the place of an older checkpoint. Got {target}, which is {what}. "
            "Choose another name."
        )


def _place(folder: Path, target: Path) -> None:
    """Gives the folder its name; where that fails, everything is as it was."""
    if not os.path.lexists(target):
        os.rename(folder, target)
        with _undone(target, folder):
            sync(target.parent)
    elif _exchange(folder, target):
        try:
            sync(target.parent)
        except BaseException:
            _exchange(folder, target)
            raise
        remove(folder)
    else:
        previous = dotted(target, "previous")
        os.rename(target, previous)
        with _undone(previous, target):
            os.rename(folder, target)
            with _undone(target, folder):
                sync(target.parent)
        remove(previous)


@contextmanager
def _undone(new: Path, old: Path) -> Iterator[None]:
    """Takes a rename back when the block fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.rename(new, old)
        raise


def _exchange(left: Path, right: Path) -> bool:
    """Two names change places in one move; False where there is no such move."""
    if sys.platform != "linux":
        return False
    move = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if move is None:
        return False
    if move(_HERE, os.fsencode(left), _HERE, os.fsencode(right), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_SUCH_MOVE:
        return False
    raise OSError(number, os.strerror(number), str(right))
