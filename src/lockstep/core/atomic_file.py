"""Write a file whole or not at all, and through to the disk.

Every file that Lockstep writes for the user comes from here: logs, pictures, downloads. A checkpoint is a folder of
files and has `checkpoint/atomic_folder.py`, which uses `sync_folder` too. TensorBoard's event files do not: they only
grow, their reader skips a last record that was cut off, and a resumed run writes it again.
"""

import os
import secrets
import sys
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of a file, in one move; make its folder if there is none.

    Whoever reads the file meanwhile, or after a power failure, finds the old content or the new.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_file(Path(folder, "runs", "note.txt"), b"done")
    ...     Path(folder, "runs", "note.txt").read_text()
    'done'
    """
    path = Path(os.path.realpath(path))  # a link stays a link, and the file it leads to is replaced
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a pipe or /dev/stdout: nothing to replace, and no file can be made beside it
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
    """Add `data` at the end of a file; it is on the disk when this returns."""
    with path.open("ab") as file:
        file.write(data)
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk. Windows does so by itself."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
