"""Peers: those who are measured, as processes that wait until it is their turn."""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

HERE = Path(__file__).parent


class Peer:
    """One or more processes that get the same orders and answer together."""

    def __init__(self, name: str, commands: list[list[str]], share: tuple[int, ...] = ()) -> None:
        self.name = name
        self._processes = [
            subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=HERE,
                pass_fds=share,
            )
            for command in commands
        ]

    def ready(self) -> None:
        """Waits until every process has warmed up."""
        for answer in self._answers():
            assert answer == "ready", f"{self.name} said {answer!r} instead of 'ready'"

    def ask(self, order: str) -> float:
        """Gives the order to every process and returns the slowest one's number."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{order}\n")
            process.stdin.flush()
        return max(map(float, self._answers()))

    def close(self) -> None:
        """Ends the processes: their input ends, and they leave."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answers(self) -> list[str]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.name} ended with exit code {process.wait()}.")
            answers.append(line.strip())
        return answers


def lockstep(case: str, shards: int | None) -> Peer:
    """Lockstep on two replicas, one thread in each."""
    name = "default shards" if shards is None else f"{shards} shards"
    return Peer(f"Lockstep, {name}", [["loops.py", "lockstep", case, *(["--shards", str(shards)] if shards else [])]])


def ddp(case: str) -> Peer:
    """DDP with Gloo in two processes, one thread in each."""
    store = tempfile.mktemp(prefix="bench-store-")
    return Peer("DDP (Gloo)", [["loops.py", "ddp", case, "--rank", rank, "--store", store] for rank in "01"])


def plain(case: str) -> Peer:
    """One plain process with two threads."""
    return Peer("plain, 2 threads", [["loops.py", "plain", case, "--threads", "2"]])
