"""Peers: contenders in processes of their own, which wait on a pipe until it is their turn.

A peer is one process, or several that step together. While it waits it blocks on a read and uses no core. An order is
a line on its standard input: the name of a way to train (`step` or `fit`) and two numbers, the steps that are not
counted and those that are. The answer is a line with the seconds of each step.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

HERE = Path(__file__).parent
Way = Callable[[int, int], list[float]]


class Peer:
    """One or more processes that get the same orders and answer together."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], share: tuple[int, ...] = ()) -> None:
        self.name = name
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, text=True, cwd=HERE, pass_fds=share)
            for command in commands
        ]

    def ready(self) -> None:
        """Wait until every process has made its first steps."""
        for answer in self._answers():
            assert answer == "ready", f"{self.name} answered {answer!r} instead of 'ready'"

    def ask(self, order: str) -> list[float]:
        """Give the order to every process and return the slowest one's numbers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{order}\n")
            process.stdin.flush()
        answers = [[float(number) for number in answer.split()] for answer in self._answers()]
        return [max(numbers) for numbers in zip(*answers, strict=True)]

    def close(self) -> None:
        """End the processes: their input ends, and they leave."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
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


@dataclass(frozen=True)
class Turns:
    """A contender: one way to train in a peer."""

    peer: Peer
    way: str

    @property
    def least_warm(self) -> int:
        """Return 1 for `fit`: its first step also bears what `fit` does before it."""
        return int(self.way == "fit")

    def take_turn(self, warm: int, count: int) -> list[float]:
        """Let the peer make its steps."""
        return self.peer.ask(f"{self.way} {warm} {count}")


def serve(ways: Mapping[str, Way]) -> None:
    """Answer orders on the standard input until it ends. What else is printed goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for way in ways.values():
        way(0, 1)
    print("ready", file=answers, flush=True)
    for order in sys.stdin:
        name, warm, count = order.split()
        print(*ways[name](int(warm), int(count)), file=answers, flush=True)
