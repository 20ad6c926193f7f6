"""Writes a file completely or not at all, and syncs it to the disk.

The logs, pictures and downloads that Lockstep writes for the user go through this file. A checkpoint is a folder of
files, which `checkpoint/atomic_folder.py` writes. TensorBoard's event files are written by their own library: they only
grow, TensorBoard skips a last record that was cut off, and a resumed run writes that record again.
"""

import os
import secrets
import sys
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Replaces the content of a file with `data` atomically; creates the file's folder if it is missing.

    A process that reads the file meanwhile, or after a power failure, finds either the old content or the new content.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_file(Path(folder, "runs", "note.txt"), b"done")
    ...     Path(folder, "runs", "note.txt").read_text()
    'done'
    """
    path = Path(os.path.realpath(path))  # a symbolic link is kept, and the file that it points to is replaced
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a pipe or a device such as /dev/stdout, which cannot be replaced by a file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with new.open("xb") as file:
            file.write(data)
            os.fsync(file.fileno())  # before the rename: a file system may write the new name first
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path.parent)


def append_to_file(path: Path, data: bytes) -> None:
    """Adds `data` at the end of a file and syncs the file to the disk."""
    with path.open("ab") as file:
        file.write(data)
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Syncs a folder, so that renamed files keep their new names after a power failure. Does nothing on Windows."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
