"""Records the steps, waiting times and messages of one `fit` in its report (HTML) and its trace (JSON)."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from lockstep.checkpoint.autosave import print_notice
from lockstep.core.attempt import Attempt
from lockstep.core.packages import describe_package
from lockstep.display.report.report import Report
from lockstep.display.trace_file import TraceFile
from lockstep.errors import ArgumentError, SaveError
from lockstep.launch.command import read_command, read_commit
from lockstep.training.fit_options import FitOptions
from lockstep.training.session import Session

_MAX_OUTCOME = 200  # characters


class Output(Protocol):
    """What a recorder writes to. Times are in seconds on the clock that the processes measure with."""

    path: Path

    def add_attempt(self, attempt: Attempt, devices: Sequence[str], ended: float) -> None:
        """Adds an attempt to make a step, with the names of all devices."""

    def add_pause(self, reason: str, start: float, end: float, step: int) -> None:
        """Adds a time before this step in which the first process made no step."""

    def add_notice(self, text: str, when: float, step: int) -> None:
        """Adds a line that was printed."""

    def end_epoch(self, trainer: Any, digest: str) -> None:
        """Writes everything up to the end of an epoch, after which the state has this digest."""

    def close(self, trainer: Any, outcome: str) -> None:
        """Writes the rest; the outcome says in words how the training has ended. May be called again."""


def open_recorder(session: Session, trainer: Any, options: FitOptions) -> "Recorder | None":
    """Returns the recorder of a `fit` with a report or a trace, whose files can be written; None without either.

    In a launched world the arguments of the first process decide for all, and only the first process writes files.
    """
    processes, outputs = session.processes, list[Output]()
    if not processes.share(lambda: options.report is not None or options.trace is not None):
        return None
    processes.share(lambda: outputs.extend(_open_outputs(session, options)))
    return Recorder(session, trainer, outputs)


def _open_outputs(session: Session, options: FitOptions) -> Iterator[Output]:
    start = time.perf_counter()
    if options.report is not None:
        with _explain("report", options.report, "run.html") as path:
            started = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z} on {platform.node()}"
            yield Report(path, start, started, _describe_program(session))
    if options.trace is not None:
        with _explain("trace", options.trace, "run.json") as path:
            yield TraceFile(path, start)


@contextmanager
def _explain(name: str, given: str | PathLike[str], example: str) -> Iterator[Path]:
    """Yields the path; raises errors of writing the file inside the block as an ArgumentError or SaveError."""
    path = Path(given)
    if path.is_dir():
        raise ArgumentError(f"{name} must name a file. Got the folder {str(path)!r}. Use {str(path / example)!r}.")
    try:
        yield path
    except OSError as error:
        raise SaveError(
            f"{name}={str(path)!r} cannot be written: {error.strerror or error}. Use a path in a folder that you may "
            f"write to, for example {name}={example!r}."
        ) from error


def _describe_program(session: Session) -> dict[str, str]:
    """Returns the command, folder, git commit, versions and system of a run, by name."""
    libraries = [f"{name} {version}" for name, version in session.backend.versions.items()]
    versions = [describe_package("lockstep"), f"Python {platform.python_version()}", *libraries]
    return {
        "command": read_command(),
        "folder": str(Path.cwd()),
        "git commit": read_commit(),
        "versions": ", ".join(versions),
        "system": platform.platform(),
    }


class Recorder:
    """Observes the processes of one `fit`.

    Every process of a launched world has a recorder, because all processes measure; only the first has outputs.
    """

    def __init__(self, session: Session, trainer: Any, outputs: Sequence[Output]) -> None:
        self._session, self._trainer, self._outputs = session, trainer, list(outputs)
        self._clock = time.perf_counter  # that of the processes' stopwatches

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches; measures how long this process waits for each, and observes the step that follows."""
        while True:
            began = self._clock()
            batch = next(batches, None)
            if batch is None:
                return
            self.add_pause("input", began)
            self._session.grow_if_due()
            self._session.processes.observe(self)  # in every step, because other processes may have been started
            yield batch

    def add_attempt(self, attempt: Attempt) -> None:
        """Gives an attempt to make a step to the outputs."""
        ended = self._clock()
        self._write(lambda output: output.add_attempt(attempt, self._session.devices, ended))

    def add_notice(self, text: str) -> None:
        """Gives a line that was printed for the user to the outputs."""
        self._write(lambda output: output.add_notice(text, self._clock(), self._session.run.step))

    def add_pause(self, reason: str, start: float) -> None:
        """Gives the time from `start` to now, in which no step was made, to the outputs."""
        ended = self._clock()
        self._write(lambda output: output.add_pause(reason, start, ended, self._session.run.step))

    @contextmanager
    def measure(self, reason: str) -> Iterator[None]:
        """Gives the time of the block, in which no step is made, to the outputs."""
        began = self._clock()
        yield
        self.add_pause(reason, began)

    def end_epoch(self) -> None:
        """Writes the outputs up to this epoch; called in every process, because all compute the digest."""
        digest = self._trainer.digest()
        self._write(lambda output: output.end_epoch(self._trainer, digest))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops observing, and closes the outputs, also if the block has raised."""
        if self._session.has_processes:
            self._session.processes.observe(None)
        outcome = "finished" if kind is None else f"ended: {str(error) or kind.__name__}"[:_MAX_OUTCOME]
        self._write(lambda output: output.close(self._trainer, outcome))

    def _write(self, write: Callable[[Output], None]) -> None:
        """Calls `write` with each output, and goes on without one whose file cannot be written, as on a full disk."""
        for output in list(self._outputs):
            try:
                write(output)
            except OSError as error:
                self._outputs.remove(output)
                reason = f"cannot be written any further: {error.strerror or error}"
                print_notice(f"{output.path} {reason}. The training goes on without it.")
                with suppress(OSError):
                    output.close(self._trainer, reason)
