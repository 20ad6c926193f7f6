"""The main of a worker process.

A worker exists for its parent: it dies with it, leaves Ctrl-C to it, looks for
modules where it does, and sends it whatever goes wrong.
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
    """Runs what the parent sends and ends the process; never returns."""
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # a launcher may signal the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    link = Channel(socket.socket(fileno=descriptor))
    _leave(_serve(link))


def _die_with(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it was gone before the signal was asked for
        os._exit(1)


def _serve(link: Channel) -> int:
    """Runs the entry that the parent sends and gives the exit code."""
    try:
        sys.argv, descriptors = pickle.loads(link.receive())
        # What the worker itself starts must not hold these open.
        for descriptor in (link.fileno(), *descriptors):
            os.set_inheritable(descriptor, False)
        _entry(link.receive())(link)
    except ChannelClosed:  # the parent is done with its workers
        return 0
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        with contextlib.suppress(ChannelClosed):
            remote_errors.report(link, error)
        return 1
    return 0


def _entry(payload: bytes) -> Callable[[Channel], object]:
    try:
        entry: Callable[[Channel], object] = pickle.loads(payload)
    except ImportError as error:
        raise WorkerError(
            f"A worker must be able to import what the script uses. The worker cannot import {error.name!r}: {error}. "
            "Put its folder on sys.path before `wrap`, or define it in the script itself."
        ) from error
    except Exception as error:
        raise WorkerError(
            "A worker must be able to rebuild the model, the optimizer and the loss from a pickle. "
            f"It stopped at {type(error).__name__}: {error}. Define what is missing in the script or in a module."
        ) from error
    return entry


def _leave(code: int) -> NoReturn:
    """Ends the process without the frameworks' slow teardown, with nothing printed lost."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)
