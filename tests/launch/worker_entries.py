"""Functions that the workers of these tests run. Apart from the tests, so that a worker need not import them."""

import os
import signal
import subprocess
import sys
import time
from typing import NoReturn

from lockstep.launch.channel import Channel


class ScriptError(Exception):
    """An exception of the user that can be pickled."""


class Fussy(Exception):
    """An exception that cannot be unpickled, because its arguments are not those of its constructor."""

    def __init__(self, shard: int, value: float) -> None:
        super().__init__(f"shard {shard} gave {value}")


def echo(channel: Channel) -> None:
    while True:
        channel.send(channel.receive())


def speak(channel: Channel) -> None:
    print("one\ntwo")
    print("à côté", file=sys.stderr)
    os.write(1, b"raw \xff\n")
    sys.stdout.write("no end")
    sys.stdout.flush()
    channel.send(b"spoken")


def sleep(channel: Channel) -> None:
    channel.send(b"asleep")
    time.sleep(600)


def close_channel(channel: Channel) -> None:
    channel.receive()
    channel.close()
    time.sleep(600)


def raise_own(channel: Channel) -> NoReturn:
    raise ScriptError("shard 3 is bad")


def raise_fussy(channel: Channel) -> NoReturn:
    raise Fussy(3, 0.5)


def send_then_raise(channel: Channel) -> NoReturn:
    channel.send(b"x" * 1000)
    raise ScriptError("after a message")


def raise_at_length(channel: Channel) -> NoReturn:
    raise ScriptError("x" * 50_000_000)


def exit_with_3(channel: Channel) -> NoReturn:
    print("about to leave", file=sys.stderr)
    sys.exit(3)


def exit_with_a_message(channel: Channel) -> NoReturn:
    sys.exit("no space left")


def crash(channel: Channel) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave_a_child_with_our_output(channel: Channel) -> NoReturn:
    """Dies at once, while its own child lives on with its stdout and stderr."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    channel.send(str(child.pid).encode())
    channel.receive()
    os._exit(5)


def fork_and_die(channel: Channel) -> NoReturn:
    """Dies at once, while a fork of it lives on with its end of the channel."""
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    channel.send(str(pid).encode())
    channel.receive()
    os._exit(5)


def write_shared(channel: Channel, *, descriptor: int, index: int) -> None:
    os.pwrite(descriptor, bytes([65 + index]), index)
    channel.send(b"written")
    channel.receive()


def describe(channel: Channel) -> None:
    """Sends where the worker finds itself."""
    interrupts = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    inheritable = [number for number in os.listdir("/proc/self/fd") if int(number) > 2 and _inheritable(int(number))]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "KEPT")
    variables = {name: os.environ.get(name) for name in names}
    facts = (sys.path, os.getcwd(), sys.argv, interrupts, inheritable, sys.stdin.read(), os.getpgid(0), variables)
    channel.send(repr(facts).encode())
    channel.receive()


def _inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # the listing's own
        return False
