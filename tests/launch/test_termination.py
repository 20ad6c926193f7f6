"""SIGTERM as a request: asked once, however often it comes at that moment; a later one is meant."""

import signal
import subprocess
import sys
import threading

import pytest

from lockstep.launch import termination
from lockstep.launch.termination import Termination


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
from lockstep.launch.termination import Termination
signal.signal(signal.SIGTERM, signal.{"SIG_IGN" if ignored else "SIG_DFL"})
with Termination():
    pass
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == (0 if ignored else -signal.SIGTERM)
