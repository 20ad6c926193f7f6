"""Folders that appear whole and vanish whole, even if the process is killed at any moment.

A folder is filled under a dot name beside its final place, `.step-00000100.<token>.writing`, and renamed. If there is a
folder at that place already, the two are exchanged in a single move; on a file system without that move the old one is
first renamed to `.….previous`, and readers find it there as long as its place is empty. A folder to be removed is first
renamed to `.….discarded`. So a name without a dot is always a whole folder, and all that a killed process leaves has a
dot name.

The process that fills a folder holds the lock of its manifest, so that no other process removes it as a leftover.
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

from lockstep.checkpoint.io import MANIFEST, NAMES
from lockstep.core import file_lock
from lockstep.core.atomic_file import sync_folder
from lockstep.errors import SaveError

_DOT_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?P<role>writing|previous|discarded)", re.DOTALL)
_AT_FDCWD = -100  # a path is relative to the working directory
_RENAME_EXCHANGE = 2
_NO_SUCH_MOVE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def make_dot_name(target: Path, role: str) -> Path:
    """Return an unused dot name beside `target`."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.{role}")


@contextmanager
def fill_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder, which takes the place of `target` if the block succeeds and is removed if not."""
    make_folder(target.parent)
    remove_leftovers(target.parent, target.name)
    _check_replaceable(target)
    with ExitStack() as stack:
        folder = _make_locked(target, stack)
        try:
            yield folder
            sync_folder(folder)
            _check_replaceable(target)
            _move_into_place(folder, target)
        except BaseException:
            remove(folder)
            raise


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each of them synced to the disk before the next."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with suppress(FileExistsError):
            os.mkdir(folder)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))
        sync_folder(folder.parent)


def find_folder(target: Path) -> Path:
    """Return where the folder of this name is: in its place, or aside if a process was killed between two moves."""
    if not os.path.lexists(target):
        for path, name, role in _list_dot_names(target.parent):
            if role == "previous" and name == target.name:
                return path
    return target


def list_names(parent: Path) -> set[str]:
    """List the names in a folder, with those of folders that were moved aside and not back."""
    aside = {name for _, name, role in _list_dot_names(parent) if role == "previous"}
    return aside.union(name for name in os.listdir(parent) if not name.startswith("."))


def is_checkpoint_folder(folder: Path) -> bool:
    """Whether this is a folder, not a link, that holds nothing but a checkpoint's files."""
    return folder.is_dir() and not folder.is_symlink() and set(os.listdir(folder)) <= set(NAMES)


def discard(folder: Path) -> None:
    """Remove a checkpoint's folder. It is renamed first, so that no name leads to a folder with missing files."""
    renamed = make_dot_name(folder, "discarded")
    os.rename(folder, renamed)
    remove(renamed)


def remove(folder: Path) -> None:
    """Remove a folder with a dot name and the checkpoint files in it, as far as that is possible."""
    with suppress(OSError):
        for name in reversed(NAMES):  # the manifest last: it carries the lock
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def remove_leftovers(parent: Path, target: str | None = None) -> None:
    """Remove or move back what killed processes left of `target`, or of every name; leave what is in use."""
    for path, name, role in _list_dot_names(parent):
        if target not in (None, name):
            continue
        if path.is_symlink():
            path.unlink(missing_ok=True)
        elif role == "previous" and not os.path.lexists(parent / name):
            os.rename(path, parent / name)
        elif role == "writing":
            _remove_abandoned(path)
        else:
            remove(path)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder unless a live process is filling it.

    One without a manifest is empty, so nothing is lost: its process, if it lives, makes another.
    """
    with suppress(OSError):
        if file_lock.IS_AVAILABLE and (folder / MANIFEST).exists():
            with file_lock.hold_lock(folder / MANIFEST) as is_locked:
                if is_locked:
                    remove(folder)
        elif file_lock.IS_AVAILABLE:
            folder.rmdir()


def _list_dot_names(parent: Path) -> list[tuple[Path, str, str]]:
    """(path, name, role) of every dot name of this module in a folder."""
    matches = [_DOT_NAME.fullmatch(name) for name in (os.listdir(parent) if parent.is_dir() else ())]
    return [(parent / match[0], match["name"], match["role"]) for match in matches if match]


def _make_locked(target: Path, stack: ExitStack) -> Path:
    """Make a folder beside the target that no other process removes while the stack is open."""
    for _ in range(10):
        folder = make_dot_name(target, "writing")
        os.mkdir(folder)
        if not file_lock.IS_AVAILABLE:  # Windows, where an open file would keep the folder from being renamed
            return folder
        try:
            if stack.enter_context(file_lock.hold_lock(folder / MANIFEST)):
                return folder
        except FileNotFoundError:  # another process removed it before it was locked
            continue
        except BaseException:
            remove(folder)
            raise
    raise OSError(errno.EAGAIN, "Other processes remove new folders", str(target.parent))


def _check_replaceable(target: Path) -> None:
    """Raise if the target is something other than a checkpoint."""
    if os.path.lexists(target) and not is_checkpoint_folder(target):
        kind = "a link" if target.is_symlink() else "a folder with other files" if target.is_dir() else "a file"
        raise SaveError(f"A checkpoint cannot replace {target}, which is {kind}. Use another path.")


def _move_into_place(folder: Path, target: Path) -> None:
    """Rename the folder to its target; if that fails, everything is as it was."""
    if not os.path.lexists(target):
        os.rename(folder, target)
        with _undo_rename_on_error(target, folder):
            sync_folder(target.parent)
    elif _exchange(folder, target):
        try:
            sync_folder(target.parent)
        except BaseException:
            _exchange(folder, target)
            raise
        remove(folder)
    else:
        previous = make_dot_name(target, "previous")
        os.rename(target, previous)
        with _undo_rename_on_error(previous, target):
            os.rename(folder, target)
            with _undo_rename_on_error(target, folder):
                sync_folder(target.parent)
        remove(previous)


@contextmanager
def _undo_rename_on_error(new: Path, old: Path) -> Iterator[None]:
    """Rename `new` back to `old` if the block fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.rename(new, old)
        raise


def _exchange(left: Path, right: Path) -> bool:
    """Exchange two names in one move; return False if the system or the file system has no such move."""
    if sys.platform != "linux":
        return False
    move = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if move is None:
        return False
    if move(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_SUCH_MOVE:
        return False
    raise OSError(number, os.strerror(number), str(right))
