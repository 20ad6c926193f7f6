"""SIGTERM as a request: asked once, however often it comes at that moment; a later one is meant."""

import signal
import subprocess
import sys
import threading

import pytest

from lockstep.launch import termination
from lockstep.launch.termination import StopRequested, Termination


def test_it_only_asks_and_the_scripts_handler_comes_back():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("script"))
    try:
        with Termination() as asked:
            assert not asked.asked
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # forwarded by a launcher, say
            assert asked.asked
        assert heard == []
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["script"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_later_one_is_meant(monkeypatch):
    monkeypatch.setattr(termination, "_SECONDS_OF_ONE", -1.0)
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("script"))
    try:
        with Termination():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert heard == ["script"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_nothing_is_touched():
    before = signal.getsignal(signal.SIGTERM)

    def inside():
        with Termination() as asked:
            found.append((asked.asked, signal.getsignal(signal.SIGTERM)))

    found = []
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [(False, before)]


@pytest.mark.parametrize("ignored", [True, False])
def test_a_process_that_ignores_it_goes_on_ignoring_it(ignored):
    script = f"""
import signal
from lockstep.launch.termination import StopRequested, Termination
signal.signal(signal.SIGTERM, signal.{"SIG_IGN" if ignored else "SIG_DFL"})
with Termination():
    pass
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == (0 if ignored else -signal.SIGTERM)


@pytest.fixture
def child_ends():
    """Tells the handlers that a process of the script's has ended."""
    before = signal.getsignal(signal.SIGCHLD)
    yield lambda: signal.raise_signal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, before)


def fails(*_):
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")


def test_a_loader_that_breaks_after_the_signal_stops_the_reading():
    def batches():
        yield 1
        signal.raise_signal(signal.SIGTERM)
        fails()

    with Termination() as asked:
        read = asked.over(batches)
        assert next(read) == 1
        with pytest.raises(StopRequested):
            next(read)


def test_a_loader_that_breaks_before_the_signal_waits_for_it(monkeypatch):
    def batches():
        yield from ()
        fails()

    with Termination() as asked:
        monkeypatch.setattr(termination.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(StopRequested):
            next(asked.over(batches))


def test_a_loader_that_breaks_without_a_signal_raises_its_own_error(monkeypatch):
    monkeypatch.setattr(termination, "_SECONDS_TO_ARRIVE", 0.0)
    with Termination() as asked, pytest.raises(RuntimeError, match="killed by signal"):
        next(asked.over(lambda: map(fails, [1])))


def test_a_reader_that_ends_breaks_off_nothing_but_reading(child_ends):
    """Torch's handler raises at any moment; it is set while the loader starts its workers."""

    def batches():
        signal.signal(signal.SIGCHLD, fails)
        yield 1
        child_ends()  # nobody sends another batch
        yield 2

    with Termination() as asked:
        read = asked.over(batches)
        assert next(read) == 1
        signal.raise_signal(signal.SIGTERM)
        child_ends()  # in a step
        with pytest.raises(StopRequested):
            next(read)
    child_ends()  # the script is about to end


@pytest.mark.parametrize("first", ["child", "signal"])
def test_a_reader_that_ends_while_a_batch_is_waited_for(first, child_ends):
    def batches():
        for happen in (child_ends, lambda: signal.raise_signal(signal.SIGTERM))[:: 1 if first == "child" else -1]:
            happen()
        yield 1

    with Termination() as asked, pytest.raises(StopRequested):
        next(asked.over(batches))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCHLD])
def test_the_start_of_a_reader_is_not_broken_off(number, child_ends):
    """An exception in a hook of `os.fork` is printed and lost, and logging's lock stays locked."""
    start = eval(
        "lambda: signal.raise_signal(number)", {"__name__": "multiprocessing.popen_fork", **locals(), "signal": signal}
    )

    def batches():
        child_ends()
        if number == signal.SIGCHLD:
            asked.asked = True
        start()
        yield 1

    with Termination() as asked:
        assert next(asked.over(batches)) == 1
        assert asked.asked


def test_a_reader_that_crashes_is_still_an_error(monkeypatch, child_ends):
    monkeypatch.setattr(termination, "_SECONDS_TO_ARRIVE", 0.0)
    signal.signal(signal.SIGCHLD, fails)
    with Termination(), pytest.raises(RuntimeError, match="killed by signal"):
        child_ends()
    assert signal.getsignal(signal.SIGCHLD) is fails
