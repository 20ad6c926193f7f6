"""Reads the command that started this process, and the git commit of the script's folder."""

import shlex
import subprocess
import sys
from pathlib import Path

_SECONDS = 5.0


def read_command() -> str:
    """Returns the command line of this process, quoted for a shell.

    >>> read_command() != ""
    True
    """
    return shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]])


def read_commit() -> str:
    """Returns the git commit of the script's folder, followed by `-dirty` if files have changed since the commit.

    Returns an empty string if the folder is not in a git repository, or if git is not installed.
    """
    script = Path(sys.argv[0] if sys.argv else "")
    folder = script.resolve().parent if script.is_file() else Path.cwd()
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
