"""Ctrl-C waits for the end of the block."""

import signal
import threading
from collections.abc import Iterator

import pytest

from lockstep.launch.interrupt import deferred


@pytest.fixture(autouse=True)
def handler_is_put_back() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_arrives_at_the_end() -> None:
    done = []

    def block() -> None:
        with deferred():
            interrupt()
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["the rest"]


def test_no_interrupt_no_exception() -> None:
    with deferred():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_the_second_goes_through_at_once() -> None:
    done = []

    def block() -> None:
        with deferred():
            interrupt()
            done.append("the first waits")
            interrupt()
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["the first waits"]


def test_a_block_in_a_block_is_part_of_the_outer() -> None:
    done = []

    def block() -> None:
        with deferred():
            with deferred():
                interrupt()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["inner", "outer"]


def test_an_exception_of_the_block_is_the_context() -> None:
    def block() -> None:
        with deferred():
            interrupt()
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_of_the_users_own() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with deferred():
        interrupt()
        assert seen == []
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred():
        interrupt()
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN


def test_off_the_main_thread_nothing_happens() -> None:
    seen = []

    def run() -> None:
        with deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
