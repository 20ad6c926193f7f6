"""One step in one process: when it counts, what it holds, and the order of its shards."""

import gc
import signal
import weakref
from dataclasses import replace

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.exchange.in_process import InProcessExchange

X = np.random.default_rng(0).normal(size=(61, 6))
Y = np.arange(61) % 3


def wrapped(**options):
    return lockstep.wrap(Dense([6, 8, 3], seed=1), SGD(0.1), "cross_entropy", devices=1, shards=4, **options)


@pytest.fixture
def one_step():
    with wrapped() as trainer:
        trainer.step((X, Y), verbose=0)
        return trainer.digest()


def test_an_interrupt_during_the_update_waits_for_its_end_and_the_step_counts(monkeypatch, one_step):
    with wrapped() as trainer:
        update = trainer.session.backend.update

        def interrupted(*arguments):
            signal.raise_signal(signal.SIGINT)
            update(*arguments)

        monkeypatch.setattr(trainer.session.backend, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.step((X, Y), verbose=0)
        assert trainer.num_steps == 1
        assert trainer.digest() == one_step


def test_an_interrupt_while_processes_meet_waits_until_it_is_known_that_they_have_met(monkeypatch):
    """Else `fail` would leave the others waiting for partial sums of this process."""
    reduce, calls = InProcessExchange.reduce, []

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        calls.append("met")
        return reduce(*arguments)

    monkeypatch.setattr(InProcessExchange, "reduce", interrupted)
    monkeypatch.setattr(InProcessExchange, "fail", lambda exchange: calls.append("fail"))
    with wrapped() as trainer, pytest.raises(KeyboardInterrupt):
        trainer.step((X, Y), verbose=0)
    assert calls == ["met", "fail"]


@pytest.mark.parametrize("name", ["add", "update"])  # before the commit, and in the update itself
def test_a_step_that_raises_does_not_count(monkeypatch, name, one_step):
    with wrapped() as trainer:
        with monkeypatch.context() as patch:
            patch.setattr(trainer.session.backend, name, lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.step((X, Y), verbose=0)
        assert trainer.num_steps == 0
        trainer.step((X, Y), verbose=0)
        assert trainer.digest() == one_step


def test_shards_in_another_order_are_no_step(monkeypatch):
    """They would be added in another order, and the bits would be others."""
    with wrapped() as trainer:
        partial_sums = trainer.session.backend.partial_sums

        def in_reverse(work, fold):
            (pieces,) = work.pieces.values()
            return partial_sums(replace(work, pieces={0: dict(reversed(pieces.items()))}), fold)

        monkeypatch.setattr(trainer.session.backend, "partial_sums", in_reverse)
        with pytest.raises(AssertionError, match="shard 3 came in the place of shard 0"):
            trainer.step((X, Y), verbose=0)
        assert trainer.num_steps == 0


def test_a_missing_shard_is_no_step(monkeypatch):
    with wrapped() as trainer:
        partial_sums = trainer.session.backend.partial_sums

        def without_the_last(work, fold):
            (pieces,) = work.pieces.values()
            return partial_sums(replace(work, pieces={0: dict(list(pieces.items())[:-1])}), fold)

        monkeypatch.setattr(trainer.session.backend, "partial_sums", without_the_last)
        with pytest.raises(AssertionError, match="a shard is missing"):
            trainer.step((X, Y), verbose=0)
        assert trainer.num_steps == 0


def test_logs_that_are_kept_hold_no_gradient():
    with wrapped() as trainer:
        outcome = trainer.session.step((X, Y))
        assert outcome.total is not None
        trainer.session.step((X, Y))
        assert outcome.total is None


def test_an_outcome_is_not_held_by_the_session():
    with wrapped() as trainer:
        outcome = weakref.ref(trainer.session.step((X, Y)))
        gc.collect()
        assert outcome() is None
