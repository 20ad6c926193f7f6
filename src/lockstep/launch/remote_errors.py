"""Exceptions that are sent from a worker to the user's script.

The script should see what it would have seen without workers: the same type,
caught by the same `except`, with the worker's traceback below it. An exception
that cannot be sent arrives as a `WorkerError` that says so.
"""

import pickle
import traceback
from typing import NoReturn, TypedDict

import cloudpickle

from lockstep.errors import WorkerError
from lockstep.launch.channel import Channel

# A report of this size fits a socket's buffer: a worker that fails never waits for a reader before it leaves.
_LIMIT = 1 << 15


class Failure(TypedDict):
    """What travels."""

    type: str
    message: str
    traceback: str
    pickled: bytes | None  # the exception itself, where it survives a pickle round trip
    cause: bytes | None  # and the one that it was raised from


def encode(exception: BaseException) -> Failure:
    """Gives the exception in a form that always travels."""
    lines = "".join(traceback.format_exception(exception))
    return Failure(
        type=type(exception).__qualname__,
        message=_cut(_text(exception)),
        traceback=_cut(lines),
        pickled=_pickled(exception),
        cause=None if exception.__cause__ is None else _pickled(exception.__cause__),
    )


def report(link: Channel, exception: BaseException) -> None:
    """Sends the exception; `WorkerPool.receive` raises it in the controlling process."""
    link.send_failure(pickle.dumps(encode(exception)))


def raise_(failure: Failure, worker: str) -> NoReturn:
    """Raises the exception again, with the worker's traceback as a note; else a `WorkerError` that quotes it."""
    exception = _restored(failure["pickled"])
    if exception is None:
        exception = WorkerError(f"Worker {worker} raised {failure['type']}: {failure['message']}")
    exception.add_note(f"\nThe traceback in worker {worker}:\n{failure['traceback']}")
    raise exception from _restored(failure["cause"])


def _pickled(exception: BaseException) -> bytes | None:
    # A worker's SystemExit or KeyboardInterrupt must not act on the script. cloudpickle brings classes defined in the
    # script back as the very same class.
    if not isinstance(exception, Exception):
        return None
    try:
        data: bytes = cloudpickle.dumps(exception)
        copy = pickle.loads(data)
        same = type(copy) is type(exception) and str(copy) == str(exception)
    except Exception:  # whatever a stranger's __reduce__ raises
        return None
    return data if same and len(data) <= _LIMIT else None


def _restored(pickled: bytes | None) -> Exception | None:
    if pickled is None:
        return None
    try:
        exception = pickle.loads(pickled)
    except Exception:  # a module that only the worker could import
        return None
    return exception if isinstance(exception, Exception) else None


def _text(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:
        return "(its message cannot be shown)"


def _cut(text: str) -> str:
    """Keeps both ends of a text too long to travel."""
    return text if len(text) <= _LIMIT else f"{text[: _LIMIT // 4]}\n...\n{text[-_LIMIT // 4 :]}"
