"""However a script ends, nothing of it is left; and whatever a worker does, the script hears of it and can go on.

Most scripts train the numpy backend, whose workers start in a fraction of a second;
what is asked here does not depend on the framework. `running` asserts after each
script that no process and no shared memory is left within two seconds.
"""

import os
import re
import signal

import pytest

from integration.run_script import complaints, running

pytestmark = pytest.mark.timeout(240)

HEAD = """
import os, signal, sys, time
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense

class Net(Dense):  # what `elsewhere` does, it does in workers alone
    def __init__(self):
        super().__init__([6, 8, 3], seed=1, dropout=0.2)
        self.home = os.getpid()

    def forward(self, x, generator):
        if generator is not None:
            (self.here if os.getpid() == self.home else self.elsewhere)(x)
        return super().forward(x, generator)

    def here(self, x):
        pass

    def elsewhere(self, x):
        pass

def wrap(model, devices, optimizer=None):
    optimizer = optimizer or SGD(0.1, momentum=0.9)
    trainer = lockstep.wrap(model, optimizer, "cross_entropy", devices=devices, shards=6)
    assert len(trainer.devices) == devices
    return trainer

def batches(count):
    generator = np.random.default_rng(0)
    return [(generator.standard_normal((20, 6)), generator.integers(0, 3, 20)) for _ in range(count)]

def digests(count):
    "The digests of a run on one device, after no step and after each."
    trainer = wrap(Dense([6, 8, 3], seed=1, dropout=0.2), 1)
    result = [trainer.digest()]
    for batch in batches(count):
        trainer.step(batch, verbose=0)
        result.append(trainer.digest())
    return result
"""

TRAIN = """
trainer = wrap(Net(), 3)
for batch in batches(3):
    trainer.step(batch, verbose=0)
assert trainer.digest() == digests(3)[3]
print("trained", *trainer.session.processes.pids, flush=True)
"""

FOREVER = """
class Slow(Net):
    def here(self, x):
        time.sleep(0.02)
    elsewhere = here

trainer = wrap(Slow(), 3)
trainer.step(batches(1)[0], verbose=0)
print("trained", *trainer.session.processes.pids, flush=True)
while True:
    trainer.step(batches(1)[0], verbose=0)
"""


def started(script):
    """The script's own pid and its workers', once it has trained."""
    word, *workers = script.line().split()
    assert word == "trained"
    assert len(workers) == 2
    pids = [script.process.pid, *map(int, workers)]
    assert set(pids) <= set(script.pids())  # the mark finds them, so it would find what is left
    return pids


@pytest.mark.parametrize(
    "ending, code, error",
    [
        ("", 0, ""),
        ("trainer.close(); trainer.close()", 0, ""),
        ("del trainer", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('the script fails')", 1, "ValueError: the script fails"),
        ("with trainer:\n    raise ValueError('inside the block')", 1, "ValueError: inside the block"),
    ],
)
def test_a_script_that_ends(tmp_path, ending, code, error):
    with running(HEAD + TRAIN + ending, tmp_path) as script:
        returncode, _, stderr = script.end()
    assert returncode == code, stderr
    assert error in stderr
    assert error or not complaints(stderr)


def test_a_torch_script_without_a_main_guard(tmp_path):
    """Model and loss are defined in the script, it prints once, and a loss that is not finite changes nothing."""
    text = """
    import numpy as np
    import torch
    import lockstep

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

    def loss(outputs, targets):
        return ((outputs - targets) ** 2).mean()

    torch.manual_seed(0)
    x, y = torch.randn(50, 6), torch.randn(50, 3)
    start = Net().state_dict()

    def train(devices):
        net = Net()
        net.load_state_dict(start)
        trainer = lockstep.wrap(
            net, torch.optim.Adam(net.parameters()), loss, metrics=["mse"], devices=devices, shards=4
        )
        assert len(trainer.devices) == devices
        trainer.fit((x, y), epochs=2, batch_size=20, validation_data=(x, y), verbose=0)
        before = trainer.digest()
        bad = x.clone()
        bad[45] = float("nan")
        try:
            trainer.step((bad, y), verbose=0)
        except ArithmeticError as error:
            print("refused:", error)
        assert trainer.digest() == before
        trainer.step((x, y), verbose=0)
        return [trainer.digest(), trainer.evaluate((x, y))["mse"].hex(), trainer.predict(x).tobytes().hex()]

    print("once")
    print("equal" if train(1) == train(2) else "different")
    """
    with running(text, tmp_path) as script:
        returncode, stdout, stderr = script.end()
    assert returncode == 0, stderr
    assert not complaints(stderr)
    once, one, two, equal = stdout.splitlines()
    assert (once, equal) == ("once", "equal")
    assert "The loss is nan in step 6, shard 3." in one
    assert one == two


def test_a_script_that_is_killed(tmp_path):
    with running(HEAD + FOREVER, tmp_path) as script:
        started(script)
        script.process.kill()
        assert script.end()[0] == -signal.SIGKILL


def test_ctrl_c_ends_everything(tmp_path):
    with running(HEAD + FOREVER, tmp_path) as script:
        started(script)
        script.interrupt()
        returncode, _, stderr = script.end()
    assert returncode == -signal.SIGINT
    assert stderr.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_while_workers_come_up(tmp_path):
    text = (
        HEAD
        + "trainer = wrap(Net(), 3)\nprint('up', flush=True)\ntrainer.step(batches(1)[0], verbose=0)\ntime.sleep(600)"
    )
    with running(text, tmp_path) as script:
        assert script.line() == "up"
        script.interrupt()
        assert script.end()[0] == -signal.SIGINT


# SIGINT comes from inside, at the moment that matters: before the commit, after it, and while a worker still computes.
INTERRUPTED = """
class Stopped(Net):
    armed = False

    def here(self, x):
        if self.armed and WHERE == "before":
            self.armed = False
            os.kill(os.getpid(), signal.SIGINT)

    def elsewhere(self, x):
        if WHERE == "waiting":
            time.sleep(0.05)
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 9 and len(x) == 3 and not os.path.exists("sent"):  # the last worker's fifth step
                open("sent", "w").close()
                os.kill(self.home, signal.SIGINT)
                time.sleep(0.3)

class Late(SGD):
    armed = False

    def step(self, parameters, gradients):
        super().step(parameters, gradients)
        if self.armed and WHERE == "after" and os.getpid() == home:
            self.armed = False
            os.kill(os.getpid(), signal.SIGINT)

home = os.getpid()
model, optimizer = Stopped(), Late(0.1, momentum=0.9)
trainer = wrap(model, 3, optimizer)
data = batches(9)
interrupted = False
for index, batch in enumerate(data):
    if index == 4:
        model.armed = optimizer.armed = True
    try:
        trainer.step(batch, verbose=0)
    except KeyboardInterrupt:
        interrupted = True
        break
assert interrupted
assert index == 4
found = trainer.digest()  # new workers
known = digests(9)
print("digest", known.index(found) - index if found in known else "of no step", flush=True)
steps = trainer.session.run.step
trainer.evaluate(data[0])
assert trainer.digest() == found
for batch in data[steps:]:
    trainer.step(batch, verbose=0)
print("equal" if trainer.digest() == known[9] else "different")
"""


@pytest.mark.parametrize("where, made", [("before", 0), ("after", 1), ("waiting", 0)])
def test_ctrl_c_that_is_caught(tmp_path, where, made):
    """A step is made or not made, never half; the script goes on from there with new workers."""
    with running(f"WHERE = {where!r}" + HEAD + INTERRUPTED, tmp_path) as script:
        returncode, stdout, stderr = script.end()
    assert returncode == 0, stderr
    assert stdout.splitlines() == [f"digest {made}", "equal"], stderr


RAISES = """
class Picky(Exception):
    pass

class Bad(Net):
    def elsewhere(self, x):
        print("a shard of", len(x))
        if x.max() > 1000:
            raise Picky("too large for a worker")

trainer = wrap(Bad(), 3)
data = batches(3)
trainer.step(data[0], verbose=0)
bad = data[0][0].copy(), data[0][1]
bad[0][-1] = 7777  # in the last worker's shard
"""


def test_a_workers_exception_ends_the_script(tmp_path):
    """The shard is tried in a second worker, which raises too: the error is the first one's."""
    with running(HEAD + RAISES + "trainer.step(bad, verbose=0)", tmp_path) as script:
        returncode, stdout, stderr = script.end()
    assert returncode == 1
    assert {line.partition(" ")[0] for line in stdout.splitlines()} == {"[cpu:1]", "[cpu:2]"}
    assert "Picky: too large for a worker" in stderr
    assert "The traceback in worker cpu:2:" in stderr
    assert "in elsewhere" in stderr  # the worker's own lines


def test_a_workers_exception_is_caught_and_training_goes_on(tmp_path):
    ending = """
pids = trainer.session.processes.pids
try:
    trainer.step(bad, verbose=0)
except Picky as error:
    print(f"caught {error}\\n", end="")  # one write, which no worker's line can break
found = trainer.digest()
known = digests(3)
assert found == known[1], "the failed step changed something"
trainer.step(data[1], verbose=0)
trainer.step(data[2], verbose=0)
assert trainer.session.processes.pids == pids, "a worker was lost"
print("equal" if trainer.digest() == known[3] else "different")
"""
    with running(HEAD + RAISES + ending, tmp_path) as script:
        returncode, stdout, stderr = script.end()
    assert returncode == 0, stderr
    own = [line for line in stdout.splitlines() if not line.startswith("[")]
    assert own == ["caught too large for a worker", "equal"]


def test_a_worker_that_alone_raises_is_replaced(tmp_path):
    """The shard is tried in the script's own process, where it raises nothing, so the worker is at fault."""
    ending = """
alone = wrap(Net(), 1)
for batch in (data[0], bad):
    alone.step(batch, verbose=0)
with wrap(Bad(), 2) as trainer:
    for batch in (data[0], bad):
        trainer.step(batch, verbose=0)
    assert trainer.session.run.step == 2
    print("equal" if trainer.digest() == alone.digest() else "different")
"""
    with running(HEAD + RAISES + ending, tmp_path) as script:
        returncode, stdout, stderr = script.end()
    assert returncode == 0, stderr
    assert "equal" in stdout.splitlines()
    line = r"cpu:1 \(pid \d+\) is replaced: it raised Picky in step 1, and the same shards raised nothing in another "
    assert re.search(line + "process: too large for a worker", stderr)


def test_an_exception_in_every_process_is_the_scripts_own(tmp_path):
    """The shard is tried in the script's own process, which raises too: its own lines are in the traceback."""
    ending = """
Net.here = Bad.elsewhere
trainer = wrap(Bad(), 2)
trainer.step(bad, verbose=0)
"""
    with running(HEAD + RAISES + ending, tmp_path) as script:
        returncode, stdout, stderr = script.end()
    assert returncode == 1
    assert any(line.startswith("[cpu:1] a shard of") for line in stdout.splitlines())
    assert "Picky: too large for a worker" in stderr
    assert "The traceback in worker" not in stderr
    assert "in elsewhere" in stderr
    assert "is replaced" not in stderr


def test_a_batch_of_a_class_that_the_script_defines(tmp_path):
    text = """
import typing

class Batch(typing.NamedTuple):
    x: typing.Any
    y: typing.Any

trainer = wrap(Net(), 2)
for batch in batches(2):
    trainer.step(Batch(*batch), verbose=0)
assert trainer.evaluate([Batch(*batch)])["loss"] > 0
assert trainer.digest() == digests(2)[2]
"""
    with running(HEAD + text, tmp_path) as script:
        returncode, _, stderr = script.end()
    assert returncode == 0, stderr


def test_a_killed_worker_costs_nothing(tmp_path):
    ending = """
class Slow(Net):
    def here(self, x):
        time.sleep(0.01)
    elsewhere = here

trainer = wrap(Slow(), 3)
data = batches(200)
trainer.step(data[0], verbose=0)
print("trained", *trainer.session.processes.pids, flush=True)
made = 1
for batch in data[1:]:
    trainer.step(batch, verbose=0)
    made += 1
    assert trainer.session.run.step == made
    if made > 50 and len(trainer.session.processes.pids) == 2 and os.path.exists("killed"):
        break
assert len(trainer.session.processes.pids) == 2
trainer.step(data[made], verbose=0)  # with the worker that has joined
print("pids", *trainer.session.processes.pids, flush=True)
print("equal" if trainer.digest() == digests(made + 1)[made + 1] else "different")
"""
    with running(HEAD + ending, tmp_path) as script:
        _, first, last = started(script)
        os.kill(last, signal.SIGKILL)
        (tmp_path / "killed").touch()
        word, *pids = script.line().split()
        returncode, stdout, stderr = script.end()
    assert returncode == 0, stderr
    assert (word, int(pids[0])) == ("pids", first)
    assert int(pids[1]) != last
    assert re.search(rf"cpu:2 \(pid {last}\) was killed by SIGKILL.* (in|after) step \d+; its shards go to ", stderr)
    assert re.search(rf"cpu:2 \(pid {pids[1]}\) takes part from step \d+ on", stderr)
    assert stdout.splitlines()[-1] == "equal"


def test_a_worker_that_cannot_import_what_the_script_uses(tmp_path):
    text = """
import types
ghost = types.ModuleType("ghost")  # importable in this process alone
exec("from lockstep.backends.numpy import Dense\\nclass Net(Dense): pass", ghost.__dict__)
sys.modules["ghost"] = ghost
try:
    trainer = wrap(ghost.Net([6, 8, 3], seed=1), 2)
    trainer.step(batches(1)[0], verbose=0)
except lockstep.LockstepError as error:
    print(error)
"""
    with running(HEAD + text, tmp_path) as script:
        returncode, stdout, stderr = script.end()
    assert returncode == 0, stderr
    assert "A worker cannot import 'ghost', which the script uses" in stdout
    assert "sys.path" in stdout


NOTEBOOK = """
import code, sys, __main__
interpreter = code.InteractiveInterpreter(NAMESPACE)
for cell in CELLS:
    interpreter.runcode(compile(cell, "<cell>", "exec"))
"""


@pytest.mark.parametrize("namespace", ["__main__.__dict__", "{'__name__': '__main__', '__builtins__': __builtins__}"])
def test_a_notebook(tmp_path, namespace):
    """Cells are code without a file, and a cell is run again and again."""
    cells = [
        HEAD,
        TRAIN,
        TRAIN,
        "trainer.close()",
        "trainer.step(batches(4)[3], verbose=0)\nassert trainer.digest() == digests(4)[4]\nprint('done')",
    ]
    text = NOTEBOOK.replace("NAMESPACE", namespace).replace("CELLS", repr(cells))
    with running(text, tmp_path) as script:
        returncode, stdout, stderr = script.end()
    assert returncode == 0
    assert not complaints(stderr)
    assert [line.split()[0] for line in stdout.splitlines()] == ["trained", "trained", "done"]
