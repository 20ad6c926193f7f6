"""Writes the files of a checkpoint and syncs them to the disk; reads them, if they are regular files."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from lockstep.errors import SaveError

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
NAMES = (MANIFEST, MODEL, OPTIMIZER)  # all files in the folder of a checkpoint

_BINARY = getattr(os, "O_BINARY", 0)
# Without O_NOFOLLOW a link could lead out of the folder; without O_NONBLOCK opening a pipe would block.
_READ_FILE = os.O_RDONLY | _BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_OPEN_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NONBLOCK", 0)
_CAN_OPEN_FOLDERS = os.open in os.supports_dir_fd  # not on Windows
_CHUNK = 2**24  # the number of bytes in one write


@contextmanager
def raise_save_errors(path: Path) -> Iterator[None]:
    """Raises an `OSError` inside the block as a `SaveError` that names the checkpoint.

    >>> with raise_save_errors(Path("ckpt")):
    ...     raise OSError(28, "No space left")
    Traceback (most recent call last):
    lockstep.errors.SaveError: The checkpoint could not be saved to ckpt: No space left. Earlier checkpoints are \
unchanged. Free some disk space, or use a folder that can be written to.
    """
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        place = "" if error.filename in (None, str(path)) else f" ({error.filename})"
        raise SaveError(
            f"The checkpoint could not be saved to {path}: {error.strerror or repr(error)}{place}. "
            "Earlier checkpoints are unchanged. Free some disk space, or use a folder that can be written to."
        ) from error


def write_file(path: Path, fill: Callable[[Callable[[Any], None]], None]) -> dict[str, Any]:
    """Writes a file and syncs it to the disk; returns its length and its sha256.

    `fill(put)` calls `put` with one buffer of the content after another. The sha256 is computed at the same time, so
    that a large file need not be read again.
    """
    digest = hashlib.sha256()
    length = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o666)

    def put(buffer: Any) -> None:
        nonlocal length
        view = memoryview(buffer)
        digest.update(view)
        length += len(view)
        while view:
            view = view[os.write(descriptor, view[:_CHUNK]) :]

    try:
        fill(put)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": length, "sha256": digest.hexdigest()}


class OpenFolder:
    """An open folder, whose files can be read even if another process renames another folder to its name.

    `==` compares path, device and inode number of two open folders. The inode number of a closed folder may be reused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, _OPEN_FOLDER) if _CAN_OPEN_FOLDERS else None
        found = os.stat(path) if self._descriptor is None else os.fstat(self._descriptor)
        self._identity = path, found.st_dev, found.st_ino

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenFolder) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __enter__(self) -> "OpenFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def open(self, name: str) -> BufferedReader:
        """Returns a file of the folder, opened for reading; raises if it is not a regular file."""
        place = self.path / name if self._descriptor is None else name
        descriptor = os.open(place, _READ_FILE, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{name} is not a regular file")
        return os.fdopen(descriptor, "rb")
