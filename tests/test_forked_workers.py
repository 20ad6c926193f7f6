"""A worker that is forked from the template is like one that is an interpreter of its own."""

import json
import os
import signal
import sys
from contextlib import closing, suppress

import pytest

from forked_workers import EVERY_WORKER, Template
from lockstep.launch.worker_pool import WorkerPool


def describe(channel):
    """Sends what a worker has from the process that started it."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing itself
            links[name] = os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
    handlers = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)]
    streams = [
        (stream.fileno(), stream.encoding, stream.errors, stream.line_buffering) for stream in (sys.stdout, sys.stderr)
    ]
    group = os.getpgid(0) == os.getpid(), os.getsid(0)
    found = os.getppid(), group, links, handlers, streams, sys.argv, sys.path, os.getcwd(), dict(os.environ)
    channel.send(json.dumps(found).encode())
    channel.receive()


def describe_worker(share):
    """Returns whether a worker is a copy of another process, and what it describes."""
    pool = WorkerPool(share=[share])
    worker = pool.start("cpu:1", describe)
    found = json.loads(worker.receive())
    with open(f"/proc/{worker.pid}/cmdline", "rb") as file:
        is_copy = b"forked_workers" in file.read()
    pool.close()
    return is_copy, found


@pytest.fixture(scope="module")
def forked_workers():
    """No worker is a copy here but those of the test."""


def test_a_copy_has_what_an_interpreter_of_its_own_has(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with closing(Template(EVERY_WORKER)) as template, open(os.memfd_create("test")) as shared:
        is_copy, expected = describe_worker(shared.fileno())
        assert not is_copy
        with template.in_use():
            assert describe_worker(shared.fileno()) == (True, expected)
            monkeypatch.setenv("OMP_NUM_THREADS", "3")  # which a library may read as it is imported
            is_copy, found = describe_worker(shared.fileno())
    assert not is_copy
    assert found[-1]["OMP_NUM_THREADS"] == "3"
