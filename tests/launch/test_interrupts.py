"""Deferred Ctrl-C: SIGINT takes effect at the end of the block."""

import signal
import threading
from collections.abc import Iterator

import pytest

from lockstep.launch.deferred_signals import defer_all_interrupts, defer_interrupts


@pytest.fixture(autouse=True)
def handler_is_put_back() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_takes_effect_at_the_end() -> None:
    done = []

    def block() -> None:
        with defer_interrupts():
            interrupt()
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["the rest"]


def test_a_block_without_an_interrupt() -> None:
    with defer_interrupts():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_a_second_interrupt_is_delivered_at_once() -> None:
    done = []

    def block() -> None:
        with defer_interrupts():
            interrupt()
            done.append("the first waits")
            interrupt()
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["the first waits"]


def test_any_number_of_interrupts_waits_for_the_end_of_a_bounded_block() -> None:
    done = []

    def block() -> None:
        with defer_all_interrupts():
            for _ in range(5):
                interrupt()
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["the rest"]


def test_a_bounded_block_inside_another_block_is_not_interrupted() -> None:
    done = []

    def block(before: int) -> None:
        with defer_interrupts():
            for _ in range(before):
                interrupt()
            with defer_all_interrupts(), defer_all_interrupts(), defer_interrupts():
                interrupt()
                interrupt()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        block(0)
    assert done == ["inner", "outer"]  # all of them count as the first of the outer block
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        block(1)
    assert done == ["inner"]  # the second of the outer block


def test_a_nested_block_is_part_of_the_outer_one() -> None:
    done = []

    def block() -> None:
        with defer_interrupts():
            with defer_interrupts():
                interrupt()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["inner", "outer"]


def test_an_exception_of_the_block_is_the_interrupts_context() -> None:
    def block() -> None:
        with defer_interrupts():
            interrupt()
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_the_script_installed() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with defer_interrupts():
        interrupt()
        assert seen == []
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_interrupts():
        interrupt()
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN


def test_other_threads_do_not_change_the_handler() -> None:
    seen = []

    def run() -> None:
        with defer_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
