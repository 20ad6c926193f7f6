"""The main function of a worker process.

A worker ends when its parent ends. It ignores Ctrl-C and SIGTERM, because the parent decides when it ends. It has the
parent's sys.path, and sends every exception to the parent.
"""

import contextlib
import ctypes
import faulthandler
import io
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from lockstep.errors import WorkerError
from lockstep.launch import remote_errors
from lockstep.launch.channel import Channel, ChannelClosed

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> NoReturn:
    """Runs the function that the parent sends, and ends the process; never returns."""
    _request_death_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    channel = Channel(socket.socket(fileno=descriptor))
    _exit(_run(channel))


def _request_death_with(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before the signal was requested
        os._exit(1)


def _run(channel: Channel) -> int:
    """Runs the function that the parent sends; returns the exit code."""
    try:
        sys.argv, descriptors, num_buffers = pickle.loads(channel.receive())
        # Processes that the worker starts must not inherit these, because they would hold them open.
        for descriptor in (channel.fileno(), *descriptors):
            os.set_inheritable(descriptor, False)
        _load_entry(channel.receive(), [channel.receive() for _ in range(num_buffers)])(channel)
    except ChannelClosed:  # the parent has closed its workers
        return 0
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        with contextlib.suppress(ChannelClosed):
            remote_errors.send_exception(channel, error)
        return 1
    return 0


def _load_entry(payload: bytes, buffers: list[bytes]) -> Callable[[Channel], object]:
    try:
        entry: Callable[[Channel], object] = pickle.loads(payload, buffers=buffers)
    except ImportError as error:
        raise WorkerError(
            f"A worker cannot import {error.name!r}, which the script uses: {error}. Put the module's folder on "
            "sys.path before `wrap`, or define what the script uses in the script itself."
        ) from error
    except Exception as error:
        raise WorkerError(
            "A worker cannot unpickle the model, the optimizer or the loss. "
            f"It raised {type(error).__name__}: {error}. Define the classes and functions that they need in the "
            "script, or in a module that a worker can import."
        ) from error
    return entry


def _exit(code: int) -> NoReturn:
    """Flushes all output and ends the process without the frameworks' slow teardown."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)
