"""A pool of workers: fresh interpreters that this process starts and that end with it.

The workers end when `close` is called, when the pool is garbage-collected, when the script ends in any way, and, by the
kernel's parent-death signal, when the script is killed.
"""

import os
import platform
import weakref
from collections.abc import Callable, Sequence

from lockstep.errors import PlatformError
from lockstep.launch.channel import Channel
from lockstep.launch.process import Process
from lockstep.launch.supervisor import Supervisor
from lockstep.launch.worker import Worker


def require_linux() -> None:
    """Raises `PlatformError` if this platform cannot run worker processes."""
    try:
        for call in ("memfd_create", "pidfd_open", "eventfd"):
            getattr(os, call)
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise PlatformError(
            "Several CPU replicas need Linux 5.3 or later, with memfd_create, pidfd_open and eventfd. "
            f"This is {platform.system()} {platform.release()}: {error}. Use devices=1."
        ) from None


class WorkerPool:
    """Starts workers, one at a time, and ends all of them on `close`.

    The descriptors in `share` stay open in every worker under the same numbers; they must be open whenever a worker
    starts.
    """

    def __init__(self, *, share: Sequence[int] = ()) -> None:
        require_linux()
        self._share = tuple(share)
        self._supervisor = Supervisor(weakref.ref(self))
        weakref.finalize(self, Supervisor.close, self._supervisor)

    def start(self, name: str, entry: Callable[[Channel], object]) -> Worker:
        """Starts a worker that runs `entry(channel)` until it returns. Returns before the process exists.

        `entry` is pickled by cloudpickle before this method returns. If the process cannot be started, the worker's
        methods raise WorkerError.
        """
        self._supervisor.require_open()
        process = Process(name, entry, self._share)
        self._supervisor.start(process)
        return Worker(process, self._supervisor)

    def close(self) -> None:
        """Closes the channels, kills workers that have not ended half a second later, and reaps all. Idempotent."""
        self._supervisor.close()
