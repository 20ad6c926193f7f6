"""Workers that are forked from an interpreter which has imported the framework already.

The first second or two of a worker are the same in every test: it imports torch and Lockstep. Here one process, the
template, does so once in a test run, and a worker is a copy of it, made before it has seen anything of a test. All else
is as with a worker that Lockstep starts: it is a child of this process with a group, descriptors and an environment of
its own, and runs the same code. Scripts, and what tests/launch starts, are interpreters of their own as ever.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from lockstep.launch import process

PR_SET_CHILD_SUBREAPER = 36
MOST_BYTES, MOST_DESCRIPTORS = 1 << 20, 64  # of a request
EVERY_WORKER = ("lockstep.backends.numpy", "lockstep.launch.worker_main", "lockstep.processes.worker_loop")
TORCH_WORKER = (*EVERY_WORKER, "torch._dynamo", "lockstep.backends.torch.backend")
KERAS_WORKER = (*TORCH_WORKER, "keras", "lockstep.backends.keras.on_torch")


class Template:
    """The process that is copied. A worker whose environment differs from its own has an interpreter of its own."""

    def __init__(self, modules: tuple[str, ...], lasting: Set[str] = frozenset()) -> None:
        self._lasting = lasting  # variables that change nothing in a worker
        self._variables = self._select(os.environ)
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        code = "import sys; sys.path[:] = sys.argv[2:]; import forked_workers; forked_workers.serve(int(sys.argv[1]))"
        flags = subprocess._args_from_interpreter_flags()
        command = [sys.executable, *flags, "-c", code, str(theirs.fileno()), *sys.path]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0)
        self._requests.send(pickle.dumps(modules))

    def close(self) -> None:
        """Ends the template."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Lockstep's worker processes are copies of the template meanwhile."""
        forked = type("Forked", (Forked,), {"template": self})
        with mock.patch.object(process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": forked})):
            yield

    def is_fit(self, environment: Mapping[str, str]) -> bool:
        """Returns whether a copy is what a fresh interpreter with these variables would be."""
        return self._select(environment) == self._variables

    def fork(self, command: list[str], environment: Mapping[str, str], descriptors: dict[int, int]) -> int:
        """Returns the pid of a copy that runs the command with these descriptors, by the number they have there."""
        code, *arguments = command[command.index("-c") + 1 :]
        request = code, ["-c", *arguments], os.getcwd(), dict(environment), [*descriptors]
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # an orphan becomes a child of this process
            try:
                socket.send_fds(self._requests, [pickle.dumps(request)], [*descriptors.values()])
                return int(self._requests.recv(MOST_BYTES))
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _select(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environment.items() if name not in self._lasting}


class Forked(subprocess.Popen):
    """A process as the standard library starts it, but a copy of the template."""

    template: Template

    def _execute_child(
        self, args: Any, executable: Any, preexec: Any, close: Any, share: Any, cwd: Any, env: Any, *rest
    ):
        if not self.template.is_fit(env):
            return super()._execute_child(args, executable, preexec, close, share, cwd, env, *rest)
        pipes = rest[3:9]  # of each stream the end that is read and the end that is written
        descriptors = {0: pipes[0], 1: pipes[3], 2: pipes[5], **{number: number for number in share}}
        self.pid = self.template.fork(args, env, descriptors)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def serve(descriptor: int) -> None:
    """Is the template: imports the modules, then makes a copy of this process for each request."""
    tests = os.getppid()
    requests = socket.socket(fileno=descriptor)
    for name in pickle.loads(requests.recv(MOST_BYTES)):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, MOST_DESCRIPTORS)
        if not request:
            return
        if not os.fork():
            break
        os.wait()
        for number in descriptors:
            os.close(number)
    if os.fork():
        os._exit(0)  # so that the copy becomes a child of the process that runs the tests
    while os.getppid() != tests:
        time.sleep(0.0005)
    os.setpgid(0, 0)
    code, sys.argv, folder, variables, numbers = pickle.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    requests.send(b"%d" % os.getpid())
    arrange_descriptors(dict(zip(numbers, descriptors, strict=True)))
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    np.random.seed()  # from the operating system, as in a fresh interpreter
    exec(code, vars(sys.modules["__main__"]))


def arrange_descriptors(wanted: dict[int, int]) -> None:
    """Gives every descriptor its number, and closes all others."""
    above = max(wanted) + 1
    copies = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for number, descriptor in wanted.items()}
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - {*copies.values()}:
        with contextlib.suppress(OSError):  # the listing itself
            os.close(number)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)
