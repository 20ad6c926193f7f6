"""Events: a file of numbers over steps, as TensorBoard reads it.

Written through TensorBoard's own protos and records. Its asynchronous writer is not
used: where TensorFlow is installed, that one would import it.
"""

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import MissingExtra

VERSION = "brain.Event:2"

_numbers = itertools.count()


def require() -> None:
    """An error that says what to install, where TensorBoard is missing.

    >>> require()
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            'Event files need tensorboard. Install it: pip install "lockstep-train[tensorboard]"'
        ) from error


class Events:
    """One event file, new in its folder.

    >>> import tempfile
    >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     events = Events(Path(folder))
    ...     events.scalars(3, {"epoch_loss": 0.5})
    ...     events.close()
    ...     read = EventAccumulator(folder).Reload().Scalars("epoch_loss")
    >>> [(event.step, event.value) for event in read]
    [(3, 0.5)]
    """

    def __init__(self, folder: Path) -> None:
        import socket

        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # Files of a folder are read in the order of their names: the later one must come last.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = RecordWriter((folder / name).open("wb"))
        self._write(file_version=VERSION)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds numbers by name, all at one step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        items = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=step, summary=Summary(value=items))

    def restart(self, step: int) -> None:
        """Takes back what earlier files of the folder hold from this step on."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def flush(self) -> None:
        """Brings everything into the file."""
        self._file.flush()

    def close(self) -> None:
        """Ends the file. May be called twice."""
        self._file.close()

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **content).SerializeToString())
