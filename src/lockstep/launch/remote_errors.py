"""Exceptions that are sent from a worker to the user's script.

The script gets the exception that it would get without workers: the same type, caught by the same `except`, with the
worker's traceback as a note. An exception that cannot be pickled is raised as a `WorkerError` that quotes it.
"""

import pickle
import traceback
from typing import NoReturn, TypedDict

import cloudpickle

from lockstep.errors import WorkerError
from lockstep.launch.channel import Channel

# A report of this size fits into a socket's buffer, so a worker that fails can exit before the report is read.
_LIMIT = 1 << 15


class Failure(TypedDict):
    """A pickled exception with its traceback, or a description of an exception that cannot be pickled."""

    type: str
    message: str
    traceback: str
    pickled: bytes | None  # the exception itself, if it survives a pickle round trip
    cause: bytes | None  # likewise the exception it was raised from


def encode(exception: BaseException) -> Failure:
    """Returns the exception as a `Failure`, which can always be pickled."""
    lines = "".join(traceback.format_exception(exception))
    return Failure(
        type=type(exception).__qualname__,
        message=_cut(_format_message(exception)),
        traceback=_cut(lines),
        pickled=_try_pickle(exception),
        cause=None if exception.__cause__ is None else _try_pickle(exception.__cause__),
    )


def send_exception(channel: Channel, exception: BaseException) -> None:
    """Sends an exception to the controller, in which `Worker.receive` raises it."""
    channel.send_failure(pickle.dumps(encode(exception)))


def raise_received(failure: Failure, worker: str) -> NoReturn:
    """Raises a worker's exception with the worker's traceback as a note; or a `WorkerError` that quotes it."""
    exception = _try_unpickle(failure["pickled"])
    if exception is None:
        exception = WorkerError(f"Worker {worker} raised {failure['type']}: {failure['message']}")
    exception.add_note(f"\nThe traceback in worker {worker}:\n{failure['traceback']}")
    raise exception from _try_unpickle(failure["cause"])


def _try_pickle(exception: BaseException) -> bytes | None:
    # Only Exceptions, because a worker's SystemExit or KeyboardInterrupt must not end the script. cloudpickle, because
    # it restores a class defined in the script as that same class.
    if not isinstance(exception, Exception):
        return None
    try:
        data: bytes = cloudpickle.dumps(exception)
        copy = pickle.loads(data)
        same = type(copy) is type(exception) and str(copy) == str(exception)
    except Exception:  # a foreign __reduce__ may raise anything
        return None
    return data if same and len(data) <= _LIMIT else None


def _try_unpickle(pickled: bytes | None) -> Exception | None:
    if pickled is None:
        return None
    try:
        exception = pickle.loads(pickled)
    except Exception:  # a module that only the worker could import
        return None
    return exception if isinstance(exception, Exception) else None


def _format_message(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:
        return "(its message cannot be shown)"


def _cut(text: str) -> str:
    """Returns the text, without its middle part if it is longer than the limit."""
    return text if len(text) <= _LIMIT else f"{text[: _LIMIT // 4]}\n...\n{text[-_LIMIT // 4 :]}"
