"""Read and write the files of a checkpoint: written through to the disk, and read only if they are regular files."""

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
NAMES = (MANIFEST, MODEL, OPTIMIZER)  # a checkpoint's folder holds these and nothing else

_BINARY = getattr(os, "O_BINARY", 0)
# A link could lead out of the folder, and opening a pipe would block.
_READ_FILE = os.O_RDONLY | _BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_OPEN_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NONBLOCK", 0)
_CAN_OPEN_FOLDERS = os.open in os.supports_dir_fd  # not on Windows
_CHUNK = 2**24  # bytes in one write


@contextmanager
def raise_save_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `SaveError`.

    >>> with raise_save_errors(Path("ckpt")):
    ...     raise OSError(28, "No space left")
    Traceback (most recent call last):
    lockstep.errors.SaveError: The checkpoint could not be saved to ckpt: No space left. Checkpoints saved before are \
whole. Make room, or use a folder that can be written to.
    """
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        place = "" if error.filename in (None, str(path)) else f" ({error.filename})"
        raise SaveError(
            f"The checkpoint could not be saved to {path}: {error.strerror or repr(error)}{place}. "
            "Checkpoints saved before are whole. Make room, or use a folder that can be written to."
        ) from error


def write_file(path: Path, fill: Callable[[Callable[[Any], None]], None]) -> dict[str, Any]:
    """Write a file through to the disk; return its length and digest. `fill(put)` puts one buffer after the other.

    The digest is computed on the way, so that no second pass over a large file is needed.
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
    """A folder that is held open, so that its files can be read even if another folder takes its name meanwhile.

    While it is held, no other folder is equal to it; afterwards its inode number may be reused.
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
        """Open one of its files for reading; raise if it is not a regular file."""
        place = self.path / name if self._descriptor is None else name
        descriptor = os.open(place, _READ_FILE, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{name} is not a file")
        return os.fdopen(descriptor, "rb")
