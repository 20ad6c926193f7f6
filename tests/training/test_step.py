"""One step in one process: when it counts, what it holds, and the order of its leaves."""

import gc
import signal
import weakref

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense

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

        def interrupted(total, work):
            signal.raise_signal(signal.SIGINT)
            update(total, work)

        monkeypatch.setattr(trainer.session.backend, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.step((X, Y), verbose=0)
        assert trainer.num_steps == 1
        assert trainer.digest() == one_step


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


def test_leaves_in_another_order_are_no_step(monkeypatch):
    """They would be added in another order, and the bits would be others."""
    with wrapped() as trainer:
        leaves = trainer.session.backend.leaves

        def in_reverse(work, into):
            yield from reversed(list(leaves(work, into)))

        monkeypatch.setattr(trainer.session.backend, "leaves", in_reverse)
        with pytest.raises(AssertionError, match="shard 3 came in the place of shard 0"):
            trainer.step((X, Y), verbose=0)
        assert trainer.num_steps == 0


def test_logs_that_are_kept_hold_no_gradient():
    with wrapped() as trainer:
        outcome = trainer.session.step((X, Y))
        assert trainer.session.grad_norm(outcome) > 0
        trainer.session.step((X, Y))
        assert outcome.total is None


def test_an_outcome_is_not_held_by_the_session():
    with wrapped() as trainer:
        outcome = weakref.ref(trainer.session.step((X, Y)))
        gc.collect()
        assert outcome() is None
