"""Creates, replaces and removes folders atomically, even if the process is killed at any moment.

A folder is filled under a temporary name that begins with a dot, `.step-00000100.<token>.writing`, and then renamed. If
a folder with the final name exists already, the two names are exchanged in one system call. On a file system that
cannot do this, the old folder is first renamed to `.….previous`, and readers use this name until the new folder has the
final name. A folder to be removed is first renamed to `.….discarded`. So a folder whose name has no dot is always
complete, and whatever a killed process leaves has a name with a dot.

The process that fills a folder has a lock on the folder's manifest, so that no other process removes the folder as a
leftover.
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
    """Returns an unused name beside `target` that begins with a dot."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.{role}")


@contextmanager
def fill_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder, which replaces `target` if the block succeeds, and is removed if the block raises."""
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
    """Creates a folder and its missing parents, each synced to the disk before the next is created."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with suppress(FileExistsError):
            os.mkdir(folder)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))
        sync_folder(folder.parent)


def find_folder(target: Path) -> Path:
    """Returns `target`, or the temporary name to which a killed process has renamed it in order to replace it."""
    if not os.path.lexists(target):
        for path, name, role in _list_dot_names(target.parent):
            if role == "previous" and name == target.name:
                return path
    return target


def list_names(parent: Path) -> set[str]:
    """Returns the names in a folder, including the final names of folders that a killed process has renamed."""
    aside = {name for _, name, role in _list_dot_names(parent) if role == "previous"}
    return aside.union(name for name in os.listdir(parent) if not name.startswith("."))


def is_checkpoint_folder(folder: Path) -> bool:
    """Returns whether `folder` is a folder, not a link, that contains only files of a checkpoint."""
    return folder.is_dir() and not folder.is_symlink() and set(os.listdir(folder)) <= set(NAMES)


def discard(folder: Path) -> None:
    """Removes the folder of a checkpoint. Renames it first, so that no checkpoint ever lacks some of its files."""
    renamed = make_dot_name(folder, "discarded")
    os.rename(folder, renamed)
    remove(renamed)


def remove(folder: Path) -> None:
    """Removes a folder with a temporary name and the checkpoint files in it; ignores errors."""
    with suppress(OSError):
        for name in reversed(NAMES):  # the manifest last, because the lock is on the manifest
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def remove_leftovers(parent: Path, target: str | None = None) -> None:
    """Removes the temporary folders of killed processes for `target`, or, if `target` is None, for every name.

    If a process was killed after it had renamed an old folder, and before the new folder had the old name, the old
    folder is renamed back. A folder that a live process is filling is not removed.
    """
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
    """Removes a folder unless a live process is filling it.

    A folder without a manifest is removed too: it is empty, and a live process creates another folder instead.
    """
    with suppress(OSError):
        if file_lock.IS_AVAILABLE and (folder / MANIFEST).exists():
            with file_lock.hold_lock(folder / MANIFEST) as is_locked:
                if is_locked:
                    remove(folder)
        elif file_lock.IS_AVAILABLE:
            folder.rmdir()


def _list_dot_names(parent: Path) -> list[tuple[Path, str, str]]:
    """Returns (path, final name, role) for every folder in `parent` with a temporary name of this module."""
    matches = [_DOT_NAME.fullmatch(name) for name in (os.listdir(parent) if parent.is_dir() else ())]
    return [(parent / match[0], match["name"], match["role"]) for match in matches if match]


def _make_locked(target: Path, stack: ExitStack) -> Path:
    """Returns a new folder beside the target, with a lock until the stack is closed: no other process removes it."""
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
    """Raises SaveError if the target exists and is not the folder of a checkpoint."""
    if os.path.lexists(target) and not is_checkpoint_folder(target):
        kind = "a link" if target.is_symlink() else "a folder with other files" if target.is_dir() else "a file"
        raise SaveError(f"A checkpoint cannot replace {target}, which is {kind}. Use another path.")


def _move_into_place(folder: Path, target: Path) -> None:
    """Renames the folder to its target; if this fails, renames everything back."""
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
    """Renames `new` back to `old` if the block fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.rename(new, old)
        raise


def _exchange(left: Path, right: Path) -> bool:
    """Exchanges the names of two folders atomically; returns False if the operating or file system cannot do this."""
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
