"""Files: bytes that are on the disk when they are said to be, and none that are not ours to read."""

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


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading, if it is a file and not a link to one."""
    file = open(path, "rb", opener=lambda name, _: os.open(name, _READ))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path.name} is not a file")
    return file


def sync(folder: Path) -> None:
    """Brings the names in a folder to the disk; Windows does it by itself."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
