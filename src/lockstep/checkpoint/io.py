"""Reading and writing a checkpoint's files: written through to the disk, and read only if they are regular files."""

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from lockstep.errors import SaveError

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
NAMES = (MANIFEST, MODEL, OPTIMIZER)  # a checkpoint's folder holds these and nothing else

_BINARY = getattr(os, "O_BINARY", 0)
# A link could lead out of the folder, and a pipe would keep its reader waiting.
_READ = os.O_RDONLY | _BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_LOOK = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NONBLOCK", 0)
_HOLDS = os.open in os.supports_dir_fd  # Windows opens no folders
_CHUNK = 2**24  # bytes in one write


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turns what the operating system refuses, inside the block, into a `SaveError`.

    >>> with saving(Path("ckpt")):
    ...     raise OSError(28, "No space left")
    Traceback (most recent call last):
    lockstep.errors.SaveError: A checkpoint needs a folder that can be written to, and room in it. Got 'No space left' \
while saving to ckpt. Checkpoints saved before are whole. Make room, or save to another folder.
    """
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        place = "" if error.filename in (None, str(path)) else f" ({error.filename})"
        raise SaveError(
            f"A checkpoint needs a folder that can be written to, and room in it. Got {error.strerror or error!r} "
            f"while saving to {path}{place}. Checkpoints saved before are whole. Make room, or save to another folder."
        ) from error


def write(path: Path, fill: Callable[[Callable[[Any], None]], None]) -> dict[str, Any]:
    """Writes a file to the disk itself; gives its length and digest. `fill(put)` puts one buffer after the other."""
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


class Folder:
    """A folder that is held open: what is opened in it is its own, whatever takes its name meanwhile.

    As long as it is held, no other folder is equal to it; afterwards its number may be another's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, _LOOK) if _HOLDS else None
        found = os.stat(path) if self._descriptor is None else os.fstat(self._descriptor)
        self._identity = path, found.st_dev, found.st_ino

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def open(self, name: str) -> BufferedReader:
        """Opens one of its files for reading, if it is a file and not a link to one."""
        place = self.path / name if self._descriptor is None else name
        descriptor = os.open(place, _READ, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{name} is not a file")
        return os.fdopen(descriptor, "rb")


def sync(folder: Path) -> None:
    """Brings the names in a folder to the disk; Windows does it by itself."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
