"""Faults that meet: several at once, during a recovery, in the same shard, in the same seat; and the script's own."""

import os
import signal

import pytest

import lockstep
from chaos.harness import DATA, Chaos, Fault, Undisturbed
from lockstep.backends.numpy import SGD, Dense
from lockstep.errors import BatchError, WorkerError
from lockstep.processes.seats import Seats


@pytest.fixture
def chaos(request, tmp_path):
    """Three replicas, unless a test asks for another number."""
    with Chaos(tmp_path, getattr(request, "param", 3), Undisturbed()) as chaos:
        yield chaos


def test_two_workers_die_in_one_step(chaos):
    chaos.order(Fault("step, in shard 3", "kill", 1), Fault("step, in shard 6", "exit", 2))
    chaos.check_faults("kill", "exit")


def test_every_worker_dies_in_one_step(chaos):
    chaos.order(Fault("step, sums reported", "kill", 1), Fault("step, before its shards", "kill", 2))
    chaos.check_faults("kill", "kill")


def test_a_death_while_others_recover(chaos):
    """The second worker dies when it makes the step again that the first has broken off."""
    chaos.order(Fault("step, after its shards", "kill", 1), Fault("step, slice ready", "kill", 2))
    chaos.check_faults("kill", "kill")


def test_a_death_after_the_commit_while_another_computes_the_next_step(chaos):
    chaos.order(Fault("step, in the update", "kill", 1), Fault("step, answered", "kill", 2))
    chaos.check_faults("kill", "kill")


def test_a_replacement_dies_and_so_does_a_member(chaos):
    chaos.order(Fault("step, in a shard", "kill", 1), Fault("prove, in a shard", "kill", 1))
    chaos.order_later(Fault("step, committed", "kill", 2, batch=2))
    chaos.check_faults("kill", "kill", "kill")


def test_a_shard_that_ends_two_processes_is_not_tried_in_this_one(chaos):
    shard = 5
    for seat in (1, 2):
        chaos.order(Fault(f"step, in shard {shard}", "exit", seat))
    step = chaos.trainer.session.run.step
    with pytest.raises(WorkerError, match=rf"ended while they computed shard {shard} of step {step}, .* not tried"):
        chaos.train()
    assert chaos.trainer.session.run.step == step
    assert not chaos.saboteur.list_due()
    chaos.check()  # the model is as it was, and whoever wants to can go on
    chaos.heal()
    chaos.check()


def test_an_evaluation_that_ends_two_processes_is_not_tried_in_this_one(chaos):
    shard = 3
    for seat in (1, 2):
        chaos.order(Fault(f"evaluate, in shard {shard}", "exit", seat))
    with pytest.raises(
        WorkerError, match=rf"Two processes .* both had shards .*\b{shard}\b.* not tried in this process"
    ):
        chaos.trainer.evaluate(DATA)
    assert not chaos.saboteur.list_due()
    chaos.heal()
    chaos.check()


def test_deaths_in_an_evaluation_that_share_no_shard_end_nothing(chaos):
    expected = chaos.trainer.evaluate(DATA)
    for seat in (1, 2):
        chaos.order(Fault("evaluate, in a shard", "kill", seat))
    assert chaos.trainer.evaluate(DATA) == expected
    chaos.check_faults("kill", "kill")


def test_a_shard_that_raises_in_one_process_alone(chaos):
    chaos.order(Fault("step, in shard 6", "raise", 2))
    chaos.check_faults("raise")


def test_a_shard_that_raises_everywhere_is_the_scripts_error(chaos):
    inputs, labels = DATA
    labels = labels.copy()
    labels[-1] = 9  # in the last shard, wherever that is computed
    pids = chaos.pids
    with pytest.raises(BatchError, match=r"Labels must be from 0 to 2\. Got 9"):
        chaos.trainer.step((inputs, labels))
    chaos.check()
    chaos.heal()
    chaos.check()
    assert chaos.pids == pids
    assert chaos.take_lines() == []


def test_an_evaluation_that_raises_is_the_scripts_error(chaos):
    pids = chaos.pids
    for point in ("evaluate, received", "evaluate, in a shard"):
        chaos.order(Fault(point, "an error in an evaluation", 2))
        with pytest.raises(RuntimeError, match="an error in an evaluation"):
            chaos.trainer.evaluate(DATA)
        chaos.train()
        chaos.check()
    assert chaos.pids == pids


@pytest.mark.parametrize("chaos", [2, 3], indirect=True)
def test_a_device_whose_processes_keep_ending_is_left_out(chaos):
    """Its processes end one after the other before they have made a step."""
    seat = chaos.devices - 1
    chaos.order(Fault("step, in a shard", "kill", seat), Fault("start, before the answer", "exit", seat))
    chaos.order(Fault("prove, in a shard", "kill", seat))
    lines = []
    while not any("left out" in line for line in lines):
        chaos.train()
        lines += chaos.take_lines()
    chaos.train()
    chaos.check()
    assert len(chaos.pids) == chaos.devices - 2
    others = " and ".join(f"cpu:{each}" for each in range(seat))
    assert lines[-1] == (
        f"cpu:{seat} is left out: 3 of its processes have ended without a step in between. "
        f"Training goes on with {others}"
    )


def test_another_process_is_started_when_the_step_is_made(chaos, monkeypatch):
    steps, start = [], Seats.start

    def note_step(seats, numbers, **options):
        steps.append(chaos.trainer.session.run.step)
        start(seats, numbers, **options)

    monkeypatch.setattr(Seats, "start", note_step)
    step = chaos.trainer.session.run.step
    chaos.order(Fault("step, in a shard", "kill", 1))
    chaos.check_faults("kill")
    assert steps == [step + 1]


@pytest.mark.parametrize("point", ["start, unpickling the model", "prove, in a shard"])
def test_nobody_waits_for_a_process_that_stops_before_it_takes_part(chaos, point):
    chaos.order(Fault("step, in a shard", "kill", 2))
    chaos.order(Fault(point, "stop", 2))
    while chaos.saboteur.list_due():
        chaos.train()
    for _ in range(3):
        chaos.train()
    chaos.check()
    assert len(chaos.pids) == 1


def test_a_death_between_gradients_and_their_update(capfd):
    """What the dead worker had computed is applied by the others; its replacement gets the state."""
    digests = set()
    for devices in (1, 3):
        model, sgd = Dense([6, 5, 3], seed=1), SGD(0.1, 0.9)
        with lockstep.wrap(model, sgd, "cross_entropy", devices=["cpu"] * devices, shards=8) as trainer:
            trainer.step(DATA, verbose=0)
            gradients = trainer.gradients(DATA, verbose=0)
            if devices > 1:
                os.kill(trainer.session.processes.pids[0], signal.SIGKILL)
            trainer.apply(gradients)
            trainer.step(DATA, verbose=0)
            digests.add(trainer.digest())
    assert len(digests) == 1
    assert "was killed by SIGKILL" in capfd.readouterr().err
