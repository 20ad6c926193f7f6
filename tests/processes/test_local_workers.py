"""Workers that start, answer, fail and end, seen from the script's own process."""

import gc
import os
import threading

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.errors import (
    BatchError,
    BusyError,
    DeviceError,
    LockstepError,
    NonFiniteError,
    PlanError,
    PlatformError,
)

GENERATOR = np.random.Generator(np.random.PCG64(4))
BATCH = GENERATOR.standard_normal((20, 6)), GENERATOR.integers(0, 3, 20)


def wrap(devices, **options):
    model = Dense([6, 8, 3], seed=1, dropout=0.2)
    return lockstep.wrap(model, SGD(0.1, momentum=0.9), "cross_entropy", devices=devices, **{"shards": 6, **options})


def descriptors():
    """What this process holds open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def one():
    """The digests of a run on one device after 0, 1, 2 … steps on the batch."""
    trainer = wrap(1)
    result = [trainer.digest()]
    for _ in range(4):
        trainer.step(BATCH)
        result.append(trainer.digest())
    return result


def test_close_is_idempotent_and_a_later_use_starts_again(one):
    before = descriptors()
    with wrap(3) as trainer:
        assert len(trainer.devices) == 3
        trainer.step(BATCH)
        first = trainer.session.processes.pids
        trainer.close()
        trainer.close()
        assert descriptors() == before
        trainer.step(BATCH)
        assert not set(first) & set(trainer.session.processes.pids)
        assert trainer.digest() == one[2]
    assert descriptors() == before


def test_a_trainer_that_is_dropped_takes_everything_along(one):
    """A notebook's cell is run again and again, and nobody calls close."""
    before = descriptors()
    trainer = wrap(2)
    trainer.step(BATCH)
    assert trainer.digest() == one[1]
    del trainer
    assert descriptors() == before


def test_a_loss_that_is_not_finite_changes_no_replica(one):
    inputs = BATCH[0].copy()
    inputs[-1] = np.nan  # in the last shard, which the last worker computes
    with wrap(3) as trainer:
        assert len(trainer.devices) == 3
        trainer.step(BATCH)
        for _ in range(2):
            with pytest.raises(NonFiniteError, match=r"The loss is nan in step 1, shard 5\.") as caught:
                trainer.step((inputs, BATCH[1]))
            # The shard was tried in the other worker too, which raised as well: the first one's error is raised.
            assert "The traceback in worker cpu:2:" in caught.value.__notes__[0]
            assert trainer.digest() == one[1]
        pids = trainer.session.processes.pids
        trainer.step(BATCH)
        assert trainer.session.processes.pids == pids  # nobody was lost
        assert trainer.digest() == one[2]


def test_a_loss_that_is_not_finite_in_a_worker_is_found_by_the_controller_too(one):
    inputs = BATCH[0].copy()
    inputs[-1] = np.nan
    with wrap(2) as trainer:
        assert len(trainer.devices) == 2
        trainer.step(BATCH)
        pids = trainer.session.processes.pids
        # The shard is computed once more in the other process, the script's own, so the error has no worker's note.
        with pytest.raises(NonFiniteError, match=r"The loss is nan in step 1, shard 5\.") as caught:
            trainer.step((inputs, BATCH[1]))
        has_note = hasattr(caught.value, "__notes__")
        del caught
        assert not has_note
        assert trainer.digest() == one[1]
        trainer.step(BATCH)
        assert trainer.session.processes.pids == pids
        assert trainer.digest() == one[2]


def test_a_failure_in_the_scripts_own_shard_reaches_the_workers(one):
    inputs = BATCH[0].copy()
    inputs[0] = np.nan
    with wrap(3) as trainer:
        assert len(trainer.devices) == 3
        with pytest.raises(NonFiniteError, match=r"step 0, shard 0\."):
            trainer.step((inputs, BATCH[1]))
        assert trainer.digest() == one[0]
        trainer.step(BATCH)
        assert trainer.digest() == one[1]


def test_a_failure_in_two_workers_at_once(one):
    inputs = BATCH[0].copy()
    inputs[10:] = np.nan
    with wrap(3) as trainer:
        assert len(trainer.devices) == 3
        with pytest.raises(NonFiniteError, match=r"step 0, shard [2345]\."):
            trainer.step((inputs, BATCH[1]))
        trainer.step(BATCH)
        assert trainer.digest() == one[1]


@pytest.mark.parametrize("devices", [2, 3])
def test_a_failure_in_everyone_at_once_is_told_once(one, devices):
    with wrap(devices) as trainer:
        assert len(trainer.devices) == devices
        for made in (1, 2):
            with pytest.raises(NonFiniteError, match=rf"step {made - 1}, shard 0\."):
                trainer.step((BATCH[0] * np.nan, BATCH[1]))
            with pytest.raises(LockstepError, match=r"Labels must be from 0 to 2"):
                trainer.evaluate((BATCH[0], BATCH[1] + 9))
            assert trainer.evaluate(BATCH)["loss"] > 0
            trainer.step(BATCH)
            assert trainer.digest() == one[made]


class Unreadable:
    """Travels, and cannot be unpacked where it arrives."""

    def __reduce__(self):
        return int, ("not a number",)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("first", [False, True])  # in the first step, whose command carries the plan as well
@pytest.mark.parametrize(
    "extra, error, message",
    [
        (
            threading.Lock(),
            BatchError,
            r"cannot be pickled, so it cannot be sent to a worker: cannot pickle '_thread.lock' object\.",
        ),
        (Unreadable(), ValueError, r"invalid literal for int"),
    ],
    ids=["leaves not", "arrives not"],
)
def test_a_batch_that_cannot_be_pickled_is_refused(extra, error, message, first):
    """The step is not made and not counted, and what the script wrote before it is not forgotten."""
    with wrap(1) as alone, wrap(2) as trainer:
        assert len(trainer.devices) == 2
        for each in (alone, trainer):
            if not first:
                each.step(BATCH)
            each.model.parameters["0.weight"][0] *= 2
        for use in (trainer.step, lambda batch: trainer.evaluate([batch])):
            with pytest.raises(error, match=message):
                use((*BATCH, [1.0] * 19 + [extra]))  # weights, of which the last goes to the worker
        assert trainer.session.run.step == alone.session.run.step
        for each in (alone, trainer):
            each.step(BATCH)
            each.step(BATCH)
        assert trainer.digest() == alone.digest()


def test_asking_for_the_devices_of_a_closed_trainer_starts_nobody():
    before = descriptors()
    with wrap(2) as trainer:
        trainer.close()
        assert trainer.devices == ("cpu:0", "cpu:1")
        assert descriptors() == before


@pytest.mark.timeout(60)
def test_a_trainer_that_is_used_while_it_computes(one):
    """Its attributes can be read, as from a signal handler; another command is refused, and ends no worker."""
    found = []

    with wrap(2) as trainer:
        trainer.step(BATCH)
        pids = trainer.session.processes.pids
        backend = trainer.session.processes.member.backend
        compute = backend.partial_sums

        def compute_and_use(*arguments):
            found.append((trainer.runs_callbacks, trainer.devices, trainer.session.processes.pids))
            with pytest.raises(BusyError, match=r"in the middle of another call, .* Use a trainer from one thread"):
                trainer.digest()
            return compute(*arguments)

        def use(*arguments):
            return trainer.digest()

        backend.partial_sums = compute_and_use
        trainer.step(BATCH)
        del backend.partial_sums
        assert found == [(True, ("cpu:0", "cpu:1"), pids)]
        backend.partial_sums = use
        with pytest.raises(BusyError):
            trainer.step(BATCH)
        del backend.partial_sums
        trainer.step(BATCH)
        assert trainer.session.processes.pids == pids
        assert trainer.digest() == one[3]


def test_a_failure_while_evaluating(one):
    labels = BATCH[1].copy()
    labels[-1] = 3
    with wrap(2) as trainer:
        assert len(trainer.devices) == 2
        with pytest.raises(LockstepError, match=r"Labels must be from 0 to 2. Got 3"):
            trainer.evaluate((BATCH[0], labels))
        trainer.step(BATCH)
        assert trainer.digest() == one[1]


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", ""])
def test_a_processor_with_another_memory_order(machine, monkeypatch):
    before = descriptors()
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(PlatformError, match=rf"This processor is {machine or 'unknown'}\. Use devices=1, or start"):
        wrap(2)
    assert descriptors() == before
    wrap(1).step(BATCH)


@pytest.mark.parametrize("missing", ["memfd_create", "pidfd_open", "eventfd"])
def test_a_platform_without(missing, monkeypatch):
    before = descriptors()
    monkeypatch.delattr(os, missing)
    with pytest.raises(PlatformError, match=r"Use devices=1\."):
        wrap(2)
    assert descriptors() == before
    wrap(1).step(BATCH)  # one replica needs none of it


@pytest.mark.parametrize(
    "devices, error, message",
    [
        (7, PlanError, r"devices=7 needs at least 7 shards, got shards=6. Use shards=8, or devices=6\."),
        (0, DeviceError, r"devices=0 leaves no device"),
        (-1, DeviceError, r"devices=-1 leaves no device"),
        ([], DeviceError, r"devices=\[\] leaves no device"),
        (["cpu", "cuda:0"], DeviceError, r"All devices must be of the same type. Got cpu, cuda:0\."),
        (["tpu:9", "tpu:9"], DeviceError, r"This host has no device 'tpu:9'"),
    ],
)
def test_devices_that_are_refused(devices, error, message):
    before = descriptors()
    with pytest.raises(error, match=message):
        wrap(devices)
    assert descriptors() == before


def test_more_devices_than_a_first_batch_has_shards():
    """Without shards= their number is raised, and the opening line says so."""
    with wrap(3, shards=None) as trainer:
        assert len(trainer.devices) == 3
        trainer.step(BATCH)
        assert trainer.session.run.shards == 4
        assert (
            "4 shards of 5 (the batch alone would give 1, raised because each of 3 devices needs one;"
            in trainer.opening
        )


def test_an_evaluation_that_fails_in_everyone_after_a_step_leaves_the_crew_whole():
    with wrap(2) as trainer:
        trainer.step(BATCH)
        team = trainer.session.processes
        with pytest.raises(LockstepError, match=r"Labels must be from 0 to 2"):
            trainer.evaluate((BATCH[0], BATCH[1] + 9))
        assert trainer.evaluate(BATCH)["loss"] > 0
        trainer.step(BATCH)
        assert trainer.session.processes is team
