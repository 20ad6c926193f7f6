"""One job runs, one waits, and errors come out, once."""

import subprocess
import sys
import threading
import time

import pytest

from lockstep.checkpoint import Writer


class Gate:
    """A job that says when it runs and goes on when it may."""

    def __init__(self, log, name):
        self.log, self.name = log, name
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self):
        self.began.set()
        assert self.may_end.wait(10)
        self.log.append(self.name)


def alive():
    return [thread for thread in threading.enumerate() if thread.name == "lockstep-writer"]


def fail(word="full"):
    raise OSError(word)


def test_a_newer_job_takes_the_place_of_the_waiting_one():
    log = []
    first = Gate(log, 1)
    with Writer() as writer:
        writer.submit(first)
        assert first.began.wait(10)
        for name in (2, 3, 4):
            writer.submit(lambda name=name: log.append(name))
        assert log == []
        first.may_end.set()
        writer.wait()
    assert log == [1, 4]


def test_jobs_never_run_side_by_side():
    running, most = 0, 0
    lock = threading.Lock()

    def job():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.0005)
        with lock:
            running -= 1

    with Writer() as writer:
        for _ in range(300):
            writer.submit(job)
            time.sleep(0.0002)
            assert len(alive()) <= 3
    assert most == 1


def test_a_failing_thread_does_not_stop_the_save():
    log = []
    first = Gate(log, 1)
    writer = Writer()
    writer.submit(first)
    assert first.began.wait(10)
    writer.submit(lambda: log.append(2))
    writer._run()  # as the second thread of a start that Ctrl-C broke off
    assert log == []
    first.may_end.set()
    writer.wait()
    assert log == [1, 2]


def test_the_thread_has_ended_when_wait_returns(monkeypatch):
    joined = []
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda thread: (joined.append(thread.name), join(thread)))
    with Writer() as writer:
        writer.submit(lambda: None)
    assert "lockstep-writer" in joined


def test_no_thread_before_the_first_job_nor_after_the_last():
    writer = Writer()
    assert alive() == []
    writer.wait()
    writer.submit(lambda: None)
    writer.wait()
    assert alive() == []
    writer.submit(lambda: None)  # and again
    writer.close()
    writer.close()
    assert alive() == []


def test_the_last_job_is_done_when_wait_returns():
    for _ in range(200):
        log = []
        writer = Writer()
        for name in range(3):
            writer.submit(lambda name=name, log=log: log.append(name))
        writer.wait()
        assert log[-1] == 2


@pytest.mark.parametrize("call", ["wait", "check", "close", "submit"])
def test_an_error_comes_out_once(call):
    writer = Writer()
    writer.submit(fail)
    while alive():
        time.sleep(0.001)
    with pytest.raises(OSError, match="full"):
        getattr(writer, call)(*([fail] if call == "submit" else []))
    writer.check()
    writer.close()


def test_the_first_error_counts_and_the_waiting_job_is_done():
    log = []
    first = Gate(log, 1)
    writer = Writer()

    def job():
        first()
        fail("first")

    writer.submit(job)
    assert first.began.wait(10)
    writer.submit(lambda: (log.append(2), fail("second")))
    first.may_end.set()
    with pytest.raises(OSError, match="first"):
        writer.wait()
    assert log == [1, 2]
    writer.wait()


def test_any_error_at_all():
    writer = Writer()
    writer.submit(sys.exit)
    with pytest.raises(SystemExit):
        writer.wait()


def use(writer, error=None):
    with writer:
        writer.submit(fail)
        if error:
            raise error


def test_leaving_by_an_error_of_the_block():
    with pytest.raises(ZeroDivisionError) as caught:
        use(Writer(), ZeroDivisionError())
    assert caught.value.__notes__ == ["A job in the background failed too: full"]
    with pytest.raises(OSError, match="full"):
        use(Writer())
    assert alive() == []


def test_a_wait_that_is_interrupted(monkeypatch):
    """Ctrl-C leaves `wait`, not the job; a second `wait` ends it."""
    log = []
    gate = Gate(log, 1)
    writer = Writer()
    writer.submit(gate)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer._changed, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
    gate.may_end.set()
    writer.wait()
    assert log == [1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_start_that_is_interrupted(when, monkeypatch):
    """Ctrl-C just before or after the thread is there: the job is done all the same, and once."""
    log = []
    writer = Writer()
    start = threading.Thread.start

    def interrupted(thread):
        if when == "after":
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.submit(lambda: log.append(1))
    writer.wait()
    assert log == [1]


SCRIPT = """
import time
from lockstep.checkpoint import Writer
writer = Writer()
writer.submit(lambda: (time.sleep(0.2), print("written", flush=True)))
print("ended", flush=True)
"""


def test_a_script_that_ends_waits_for_its_last_checkpoint():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "ended\nwritten\n"
    assert done.stderr == ""
