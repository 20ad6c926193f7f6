"""Finds out with which command, and from which commit of its repository, this process was started."""

import shlex
import subprocess
import sys
from pathlib import Path

_SECONDS = 5.0


def read_command() -> str:
    """Returns the command line of this process, as it can be typed into a shell.

    >>> read_command() != ""
    True
    """
    return shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]])


def read_commit() -> str:
    """Returns the git commit of the script's folder, with `-dirty` after it if files have changed since.

    Returns an empty text if the folder is in no repository, or git is not installed.
    """
    script = Path(sys.argv[0] if sys.argv else "")
    folder = script.resolve().parent if script.is_file() else Path.cwd()
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
