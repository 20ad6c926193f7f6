"""A process that saves is killed at any moment: what it said it had saved is there, and whatever is there is whole."""

import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED, KILLS = 15, 300  # that many kills in the middle of a save, in at most so many kills

# Children are forked from a process that has nothing but this to do, so that dozens of them take seconds. Each says
# the step it has saved through a pipe; a byte too few is a step not yet said.
SCRIPT = """
import os, random, signal, struct, sys, time
from pathlib import Path
import checkpoint.samples as samples
from lockstep.checkpoint import CheckpointFolder, atomic_folder, read, write

home, exchange, by_hand = Path(sys.argv[1]), sys.argv[2] == "True", sys.argv[3] == "True"
enough, most = int(sys.argv[4]), int(sys.argv[5])
if not exchange:
    atomic_folder._exchange = lambda left, right: False
moments = random.Random(0)

def store():
    return CheckpointFolder(home, keep=2, best="accuracy")

def save(step):
    snapshot = samples.snapshot(step, logs={"accuracy": step % 7})
    write(home / "mine", snapshot) if by_hand else store().save(snapshot, step)

def saved():
    if by_hand:
        return read(home / "mine")
    whole, skipped = store().newest()
    assert skipped == (), skipped
    for step in store().steps():
        assert read(store().path(step)).facts["step"] == step  # older ones too: one goes whole or not at all
    assert read(home / "best").facts["step"] in store().steps()
    assert len(store().steps()) <= 4, store().steps()  # two, the best, and one that it had no time to remove
    return whole[1]

save(0)
said, kills, interrupted = 0, 0, 0
while interrupted < enough and kills < most:  # how many of the kills fall into a save depends on the machine
    kills += 1
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        step = said
        while True:
            step += 1
            save(step)
            os.write(theirs, struct.pack("<q", step))
    os.close(theirs)
    for _ in range(moments.randint(1, 2)):  # it has saved that often, however slow the machine is
        step, = struct.unpack("<q", os.read(ours, 8))
    time.sleep(moments.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rest = b"".join(iter(lambda: os.read(ours, 8), b""))
    os.close(ours)
    interrupted += bool(samples.litter(home))
    said = max([step, *(later for later, in struct.iter_unpack("<q", rest))])
    found = saved()
    assert found.facts["step"] in (said, said + 1), (found.facts["step"], said)
    said = found.facts["step"]
    assert samples.equal(found, samples.snapshot(said, logs={"accuracy": said % 7}))
save(said + 1)
assert samples.litter(home) == []
print(said, kills, interrupted)
"""


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "store"])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "step aside"])
def test_kill_9(exchange, by_hand, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(exchange), str(by_hand), str(INTERRUPTED), str(KILLS)]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    steps, kills, interrupted = map(int, done.stdout.split())
    assert steps > kills
    assert interrupted == INTERRUPTED
