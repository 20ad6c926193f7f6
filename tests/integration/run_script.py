"""Scripts: real `python train.py` in a process of its own, and what it leaves behind.

Everything a script starts inherits a mark in its environment, by which it is found
again, whoever its parent is by now.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

MARK = "LOCKSTEP_TEST_MARK"
SECONDS_TO_VANISH = 20.0  # on a loaded machine; what is left behind stays for minutes


class Script:
    """A running script, in a process group of its own as a terminal gives it."""

    def __init__(self, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        self.mark = variables[MARK]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**plain_environment(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def line(self) -> str:
        """The next line it prints; fails with its stderr where there is none."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, self.process.communicate(timeout=120)[1]
        return text.strip()

    def end(self, timeout: float = 120) -> tuple[int, str, str]:
        """Its exit code and what it printed, once it has ended."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def interrupt(self) -> None:
        """Ctrl-C: the terminal signals the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def pids(self) -> list[int]:
        """Every running process that carries the script's mark."""
        return sorted(marked(self.mark))


@contextmanager
def running(text: str, folder: Path, *, command: Sequence[str] = (), **variables: str) -> Iterator[Script]:
    """Runs the text as `python train.py`; afterwards asserts that nothing of it is left."""
    with together(text, folder, [variables], command=[command]) as (script,):
        yield script


@contextmanager
def together(
    text: str, folder: Path, variables: Sequence[Mapping[str, str]], *, command: Sequence[Sequence[str]] = ()
) -> Iterator[list[Script]]:
    """Runs the text in several processes at once, each with variables and flags of its own."""
    file = folder / "train.py"
    file.write_text(textwrap.dedent(text))
    mark = uuid.uuid4().hex
    memory = set(os.listdir("/dev/shm"))
    flags = command or [()] * len(variables)
    scripts: list[Script] = []
    try:
        for own, extra in zip(variables, flags, strict=True):
            scripts.append(Script([sys.executable, *extra, str(file)], folder, {**own, MARK: mark}))
        yield scripts
        for script in scripts:
            script.process.wait(timeout=120)
        assert vanishing(lambda: marked(mark)) == set()
        assert vanishing(lambda: set(os.listdir("/dev/shm")) - memory) == set()
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        for script in scripts:
            script.process.communicate()


def complaints(stderr: str) -> list[str]:
    """Returns the lines of a script's stderr but those that say, on a slow machine, which process is waited for."""
    return [line for line in stderr.splitlines() if not line.startswith("waiting for ")]


def vanishing(left) -> set:
    """What is still left when the time to vanish has passed."""
    deadline = time.monotonic() + SECONDS_TO_VANISH
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    return left()


def marked(mark: str) -> set[int]:
    """The running processes that carry the mark; those dead and waiting for their heir are not counted."""
    wanted = f"{MARK}={mark}".encode()
    result = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                result.add(int(name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return result


def plain_environment() -> dict[str, str]:
    """This process's environment, with its path for modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
