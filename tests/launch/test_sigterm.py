"""SIGTERM sets a flag that the training loop reads; a second one, seconds later, gets the script's own handler."""

import signal
import subprocess
import sys
import threading

import pytest

from lockstep.launch import deferred_signals
from lockstep.launch.deferred_signals import StopRequested, Termination


def test_sigterm_only_sets_a_flag_and_the_scripts_handler_is_restored():
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append("script"))
    try:
        with Termination() as termination:
            assert not termination.asked
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # forwarded by a launcher, say
            assert termination.asked
        assert called == []
        signal.raise_signal(signal.SIGTERM)
        assert called == ["script"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_later_sigterm_gets_the_scripts_handler(monkeypatch):
    monkeypatch.setattr(deferred_signals, "_SECONDS_OF_ONE", -1.0)
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append("script"))
    try:
        with Termination():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert called == ["script"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_do_not_change_the_handler():
    before = signal.getsignal(signal.SIGTERM)

    def inside():
        with Termination() as termination:
            found.append((termination.asked, signal.getsignal(signal.SIGTERM)))

    found = []
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [(False, before)]


@pytest.mark.parametrize("ignored", [True, False])
def test_a_process_that_ignores_sigterm_still_ignores_it_afterwards(ignored):
    script = f"""
import signal
from lockstep.launch.deferred_signals import StopRequested, Termination
signal.signal(signal.SIGTERM, signal.{"SIG_IGN" if ignored else "SIG_DFL"})
with Termination():
    pass
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == (0 if ignored else -signal.SIGTERM)


@pytest.fixture
def child_ends():
    """A function that sends SIGCHLD, as the end of a child process does."""
    before = signal.getsignal(signal.SIGCHLD)
    yield lambda: signal.raise_signal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, before)


def fails(*_):
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")


def test_a_loader_error_after_the_signal_is_a_stop_request():
    def batches():
        yield 1
        signal.raise_signal(signal.SIGTERM)
        fails()

    with Termination() as termination:
        read = termination.iterate(batches)
        assert next(read) == 1
        with pytest.raises(StopRequested):
            next(read)


def test_a_loader_error_waits_for_the_signal_that_may_have_caused_it(monkeypatch):
    def batches():
        yield from ()
        fails()

    with Termination() as termination:
        monkeypatch.setattr(deferred_signals.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(StopRequested):
            next(termination.iterate(batches))


def test_a_loader_error_without_a_signal_is_raised(monkeypatch):
    monkeypatch.setattr(deferred_signals, "_SECONDS_TO_ARRIVE", 0.0)
    with Termination() as termination, pytest.raises(RuntimeError, match="killed by signal"):
        next(termination.iterate(lambda: map(fails, [1])))


def test_the_end_of_a_loader_process_interrupts_reading_but_no_step(child_ends):
    """Torch's handler raises at any moment; it is set while the loader starts its workers."""

    def batches():
        signal.signal(signal.SIGCHLD, fails)
        yield 1
        child_ends()  # the loader gets no other batch
        yield 2

    with Termination() as termination:
        read = termination.iterate(batches)
        assert next(read) == 1
        signal.raise_signal(signal.SIGTERM)
        child_ends()  # in a step
        with pytest.raises(StopRequested):
            next(read)
    child_ends()  # the script is about to end


@pytest.mark.parametrize("first", ["child", "signal"])
def test_the_end_of_a_loader_process_while_a_batch_is_read(first, child_ends):
    def batches():
        for happen in (child_ends, lambda: signal.raise_signal(signal.SIGTERM))[:: 1 if first == "child" else -1]:
            happen()
        yield 1

    with Termination() as termination, pytest.raises(StopRequested):
        next(termination.iterate(batches))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCHLD])
def test_the_start_of_a_loader_process_is_not_interrupted(number, child_ends):
    """An exception in a hook of `os.fork` is printed and lost, and logging's lock stays locked."""
    start = eval(
        "lambda: signal.raise_signal(number)", {"__name__": "multiprocessing.popen_fork", **locals(), "signal": signal}
    )

    def batches():
        child_ends()
        if number == signal.SIGCHLD:
            termination.asked = True
        start()
        yield 1

    with Termination() as termination:
        assert next(termination.iterate(batches)) == 1
        assert termination.asked


def test_a_loader_process_that_crashes_is_still_an_error(monkeypatch, child_ends):
    monkeypatch.setattr(deferred_signals, "_SECONDS_TO_ARRIVE", 0.0)
    signal.signal(signal.SIGCHLD, fails)
    with Termination(), pytest.raises(RuntimeError, match="killed by signal"):
        child_ends()
    assert signal.getsignal(signal.SIGCHLD) is fails
