"""Two network namespaces with a link between them, which stand for two hosts. Needs root and iproute2."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.79.0.1", "10.79.0.2")


@contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """Makes the namespaces; yields what to put before a command to run it in each."""
    names = [f"host{index}-{os.getpid()}" for index in range(2)]
    for name in names:
        call("ip", "netns", "add", name)
    try:
        call("ip", "link", "add", "end0", "netns", names[0], "type", "veth", "peer", "end1", "netns", names[1])
        for index, name in enumerate(names):
            call("ip", "-n", name, "addr", "add", f"{ADDRESSES[index]}/24", "dev", f"end{index}")
            for device in ("lo", f"end{index}"):
                call("ip", "-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            call("ip", "netns", "delete", name)


def call(*command: str) -> None:
    subprocess.run(command, check=True)
