"""Files: written whole or not at all, so that who reads one while a run goes on sees no half."""

import os
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Puts `data` in place of the file, in one move; makes the folder where there is none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace(Path(folder) / "runs" / "note.txt", b"done")
    ...     (Path(folder) / "runs" / "note.txt").read_text()
    'done'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_bytes(data)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
