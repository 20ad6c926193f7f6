"""Joining a world: the same script under torchrun, SLURM or its own process group gives the same bits.

Only the first of these trains a torch model; the others train numpy's, since what
is asked of the meeting does not depend on the framework. A launched process takes
seconds to import what it meets through, so most stories are told one after another
in one world of two processes, each with a trainer of its own.
"""

import json

import pytest

from integration.run_script import free_port, running, together

pytestmark = pytest.mark.timeout(120)

TORCH = """
import os, threading, torch, lockstep
from torch import nn

index = int(os.environ.get("RANK", 0))
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(150, 11, generator=generator), torch.randint(4, (150,), generator=generator)

def total(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")

torch.manual_seed(index)  # every process starts elsewhere: the first one's state counts
net = nn.Sequential(nn.Linear(11, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 4))
net.guard = threading.Lock()  # no pickle takes it: under torchrun none is made
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), metrics=["accuracy"], devices=1, shards=8) as trainer:
    history = trainer.fit((x, y), epochs=2, batch_size=61, validation_data=(x, y))
    digest = trainer.digest()
    rows = trainer.predict(x[:7]).tobytes().hex()
net = nn.Linear(11, 4)
sgd = torch.optim.SGD(net.parameters(), 1e-3)
with lockstep.wrap(net, sgd, total, devices=1, shards=8, threads=1) as trainer:  # the first process probes it
    sums = trainer.fit((x, y), batch_size=61, verbose=0).history["loss"][0].hex()
    summed = trainer.digest()


@lockstep.objective
def recur(net, batch):
    hidden = torch.tanh(net(batch["x"]) + batch["hidden"])
    return lockstep.Carried(nn.functional.cross_entropy(hidden, batch["y"]), hidden)

net = nn.Linear(11, 4)
sgd = torch.optim.SGD(net.parameters(), 0.1)
with lockstep.wrap(net, sgd, recur, devices=1, shards=8, threads=1) as trainer:
    states = []
    for size in (3, 61, 1):  # with 3 examples the second process has none, nor in its first batch
        hidden = torch.zeros(size, 4)
        for _ in range(2):
            hidden = trainer.step({"x": x[:size], "y": y[:size], "hidden": hidden}, verbose=0).carried
        assert hidden.shape == (size, 4)
        states.append(hidden.sum().item().hex())
    carried = trainer.digest()
values = digest, history.history["val_loss"][-1].hex(), rows, sums, summed, *states, carried
if index == 0:
    print("result", len(trainer.devices), *values)
"""

HEAD = """
import os, signal, sys, time
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense

index = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
generator = np.random.default_rng(1)
x, y = generator.standard_normal((150, 11)).astype("float32"), generator.integers(0, 4, 150)

def tell(*words):
    print("result", story, *words, flush=True)
"""

WRAP = """
model, optimizer = Dense([11, 9, 4], seed=1 + index, dtype="float32", dropout=0.3), SGD(0.1, momentum=0.9)
trainer = lockstep.wrap(model, optimizer, "cross_entropy", metrics=["accuracy"], shards=8)
"""

FIT = """
trainer.fit((x, y), epochs=2, batch_size=61, validation_data=(x, y))
tell(len(trainer.devices), trainer.digest())
"""


def script(**stories):
    """One script that tells these stories, each with a trainer of its own."""
    return HEAD + "".join(f"\nstory = {name!r}\n{WRAP}{text}" for name, text in stories.items())


def by_hand(count):
    """The variables that torchrun would set for each of `count` processes of one host."""
    port = str(free_port())
    return [
        {
            "RANK": str(index),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "LOCAL_RANK": str(index),
            "LOCAL_WORLD_SIZE": str(count),
        }
        for index in range(count)
    ]


def results(stdout):
    """What the processes say of themselves: [story, ...]."""
    return [line.split()[1:] for line in stdout.splitlines() if line.startswith("result")]


def by_story(stdout):
    """What a process says in each story: {story: [[word, ...], ...]}."""
    found = {}
    for story, *words in results(stdout):
        found.setdefault(story, []).append(words)
    return found


def endings(scripts):
    """Each process's exit code, stdout and stderr."""
    return [each.end() for each in scripts]


def outputs(text, folder):
    """What the script prints as a plain run, which ends well."""
    with running(text, folder) as alone:
        code, stdout, stderr = alone.end()
    assert code == 0, stderr
    return stdout


def test_two_torchruns_as_two_hosts_give_the_digest_of_a_plain_run(tmp_path):
    with running(TORCH, tmp_path) as alone:
        code, stdout, stderr = alone.end()
    assert code == 0, stderr
    ((count, *one),) = results(stdout)
    assert count == "1"
    assert stdout.count("8 shards of 7 or 8, batch 61") == 1
    port = str(free_port())
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    command = [["-m", "torch.distributed.run", *meeting, "--node-rank", str(rank)] for rank in range(2)]
    with together(TORCH, tmp_path, [{}] * 2, command=command) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    stdout = "".join(stdout for _, stdout, _ in ends)
    assert results(stdout) == [["2", *one]]
    assert stdout.count("8 shards of 7 or 8, batch 61") == 1  # only the first process prints


DECIDES = """
class Stop(lockstep.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.trainer.stop_training = True

trainer.step((x[:50], y[:50]))
if index == 0:
    optimizer.lr = 0.5
trainer.step((x[50:], y[50:]))
if index == 0:
    model.parameters["0.weight"] *= 0.5
trainer.step((x[:20], y[:20]))
history = trainer.fit((x, y), epochs=5, batch_size=30, callbacks=[Stop()], verbose=0)
tell(trainer.session.run.step, len(history.epoch), trainer.digest())
"""

# Every process has the values of all of them, also the one that runs no callbacks; and stops where the first one stops.
METRIC_OBJECTS = """
from metric_object_samples import MacroF1, Order

with lockstep.wrap(
    Dense([11, 9, 4], seed=1 + index, dtype="float32"), SGD(0.1), "cross_entropy",
    metrics={"order": Order(), "macro": MacroF1(4)}, shards=8
) as counting:
    stop = lockstep.EarlyStopping("val_macro_f1", mode="max", patience=1)
    options = {"batch_size": 61, "validation_data": (x[:40], y[:40]), "callbacks": [stop], "verbose": 0}
    history = counting.fit((x, y), epochs=9, **options).history
    logs = counting.step((x[:50], y[:50]))
    evaluated = counting.evaluate((x, y), batch_size=50)
    tell(len(history["order"]), repr(history).replace(" ", ""), logs["order"], evaluated["macro_f1"])
"""

STEP = "trainer.step((x[:50], y[:50]))\n"

# Other numbers, other examples, another seed: every process says so, and nobody makes the step.
OTHER_BATCHES = f"""
{STEP}
before = trainer.digest()

def refused(batch):
    try:
        trainer.step(batch)
    except lockstep.LockstepError as error:
        tell(type(error).__name__, error)

changed = x.copy()
changed[3, 3] += index
refused((changed[:50], y[:50]))
refused((x[index:50], y[index:50]))
trainer.session.run.seed = index
refused((x[:50], y[:50]))
trainer.session.run.seed = 0
assert trainer.digest() == before
{STEP}
"""

EVALUATE = """
def told(name, use, *data):
    try:
        said = use(*data)["loss"].hex()
    except lockstep.LockstepError as error:
        said = type(error).__name__
    tell(name, said)

wrong = y.copy()
wrong[-1] = 9  # in a shard of the last process
told("before", trainer.evaluate, (x, y))
told("fails", trainer.evaluate, (x, wrong))
told("after", trainer.evaluate, (x, y))
told("other", trainer.evaluate, (x + index, y))
told("predicts", trainer.predict, x[index:])
if index == 0:
    model.parameters["0.weight"] *= 0.5
told("written", trainer.evaluate, (x, y))
told("last", trainer.evaluate, (x, y))
"""

# Callbacks run in the first process alone, so the others would wait or take one message for another.
CALLING = """
class Calling(lockstep.Callback):
    def {moment}(self, index, logs=None):
        self.trainer.{call}

try:
    trainer.fit((x, y), epochs=2, batch_size=61, callbacks=[Calling()], verbose=0)
except lockstep.LockstepError as error:
    tell(type(error).__name__, error)
"""

FAILING = """
class Failing(lockstep.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise ValueError("the callback's own")

try:
    trainer.fit((x, y), epochs=2, batch_size=61, callbacks=[Failing()], verbose=0)
except Exception as error:
    tell("failed", type(error).__name__, error)
tell(trainer.digest())
"""

CALLBACKS = """
ema = lockstep.EMA(0.5)
best = lockstep.EarlyStopping("loss", mode="max", restore_best=True)
trainer.fit((x, y), epochs=2, batch_size=61, callbacks=[ema, best], verbose=2 if index == 0 else 0)
own = trainer.session.backend.state()["model.0.weight"].data.tobytes().hex()[:32]
with ema.applied():
    averaged = trainer.evaluate((x, y))["loss"].hex()
tell(own, averaged, trainer.digest())
"""

SAVED = """
class Batches:
    "An ordinary loader. In the second process a scheduler's signal comes with a batch."

    def __init__(self, told=None):
        self.read, self.told = 0, told

    def __len__(self):
        return 3

    def __iter__(self):
        for start in range(0, 150, 61):
            self.read += 1
            if self.read == self.told and index == 1:
                signal.raise_signal(signal.SIGTERM)
            yield x[start : start + 61], y[start : start + 61]

def train(folder, epochs=3, told=None):
    trainer.fit(Batches(told), epochs=epochs, checkpoint=folder, callbacks=[lockstep.EMA(0.9)], verbose=0)
    tell(trainer.digest())

"""

# The addresses at which this process listens, in the kernel's words: 0100007F is 127.0.0.1, zeros are all interfaces.
LISTENING = """
own = {os.stat(f"/proc/self/fd/{name}").st_ino for name in os.listdir("/proc/self/fd")
       if os.path.exists(f"/proc/self/fd/{name}")}
for kind in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{kind}").read().splitlines()[1:]:
        place, state, inode = (line.split()[each] for each in (1, 3, 9))
        if state == "0A" and int(inode) in own:
            tell(place.rpartition(":")[0])
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the one process and then the two run, so that these find what that one saved."""
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def alone(folder):
    """What one process says in the stories that one can tell."""
    stories = {"fit": FIT, "decides": DECIDES, "metrics": METRIC_OBJECTS, "callbacks": CALLBACKS}
    stories |= {"begun": SAVED + 'train("begun", epochs=1)', "whole": SAVED + 'train("whole")'}
    return by_story(outputs(script(**stories), folder))


@pytest.fixture(scope="module")
def world(folder, alone):
    """What each of two processes says in every story; the last one ends them."""
    stories = {"fit": FIT, "decides": DECIDES, "metrics": METRIC_OBJECTS}
    stories |= {"others": OTHER_BATCHES, "evaluate": EVALUATE, "callbacks": CALLBACKS}
    stories["batch_end"] = CALLING.format(moment="on_train_batch_end", call="digest()")
    stories["epoch_end"] = CALLING.format(moment="on_epoch_end", call="evaluate((x, y))")
    stories["failing"] = FAILING
    stories["begun"] = SAVED + 'train("begun")'
    stories["listening"] = LISTENING
    stories["told"] = SAVED + 'train("told", told=6)'  # the third batch of the second epoch
    with together(script(**stories), folder, by_hand(2)) as scripts:
        ends = endings(scripts)
    return [(code, by_story(stdout), stderr) for code, stdout, stderr in ends]


def said(world, story):
    """What each process says in this story."""
    for _, stories, stderr in world:
        assert story in stories, stderr
    return [stories[story] for _, stories, _ in world]


def test_two_processes_give_the_digest_of_one(world, alone):
    ((devices, digest),) = alone["fit"]
    assert devices == "1"
    assert said(world, "fit") == [[["2", digest]]] * 2


def test_on_one_host_nothing_listens_beyond_it(world):
    first, second = said(world, "listening")
    assert {address for (address,) in first + second} <= LOOPBACK
    assert first  # where the processes meet


def test_a_process_group_of_the_scripts_own(tmp_path, alone):
    """Three processes and eight shards, so that ranges do not align with the tree; the first one writes for all."""
    own = "import torch.distributed\ntorch.distributed.init_process_group('gloo')\n"
    recorded = FIT.replace("validation_data", "report='run.html', trace='run.json', validation_data")
    with together(own + script(fit=recorded), tmp_path, by_hand(3)) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert [results(stdout) for _, stdout, _ in ends] == [[["fit", "3", alone["fit"][0][1]]]] * 3
    assert alone["fit"][0][1] in (tmp_path / "run.html").read_text()
    slices = [event for event in json.loads((tmp_path / "run.json").read_text()) if event["ph"] == "X"]
    shards = {(event["tid"], event["name"]) for event in slices if event["name"].startswith("shard")}
    assert shards == {(rank, f"shard {shard}") for shard, rank in enumerate([0, 0, 0, 1, 1, 1, 2, 2])}


def test_slurm(tmp_path, alone):
    port = str(free_port())
    variables = [
        {
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(index),
            "SLURM_NTASKS": "2",
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "a-name-that-nobody-resolves",
            "MASTER_PORT": port,
        }
        for index in range(2)
    ]
    with together(script(fit=FIT, listening=LISTENING), tmp_path, variables) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    found = [by_story(stdout) for _, stdout, _ in ends]
    assert [each["fit"] for each in found] == [[["2", alone["fit"][0][1]]]] * 2
    assert {address for each in found for (address,) in each.get("listening", [])} <= LOOPBACK
    assert [stdout.count("8 shards") for _, stdout, _ in ends] == [1, 0]


def test_the_first_process_decides(world, alone):
    """Its state, its learning rate, its weights and its callbacks; the others follow."""
    assert alone["decides"][0][:2] == ["5", "1"]
    assert said(world, "decides") == [alone["decides"]] * 2


def test_metric_objects_have_the_same_values_in_every_process(world, alone):
    assert 2 <= int(alone["metrics"][0][0]) <= 9
    assert said(world, "metrics") == [alone["metrics"]] * 2


def test_a_process_with_another_batch_stops_all(world):
    for errors in said(world, "others"):
        assert len(errors) == 3
        for words in errors:
            assert " ".join(words).startswith(
                "ExactError In step 1 process 1 has other data, shards, threads or seed than process 0, but every"
            )


@pytest.fixture(scope="module")
def evaluated(world):
    """What each of two processes says of its evaluations, by name."""
    return [dict(words) for words in said(world, "evaluate")]


@pytest.fixture(scope="module")
def losses():
    """The losses on one device, with the weights as they are and as the first process writes them."""
    names = {}
    exec(HEAD + WRAP, names)
    trainer = names["trainer"]
    assert len(trainer.devices) == 1
    plain = trainer.evaluate((names["x"], names["y"]))["loss"].hex()
    trainer.model.parameters["0.weight"] *= 0.5
    return plain, trainer.evaluate((names["x"], names["y"]))["loss"].hex()


def test_a_process_that_fails_in_an_evaluation_leaves_the_others_no_result(evaluated, losses):
    assert [each["fails"] for each in evaluated] == ["PeerFailed", "BatchError"]
    assert [(each["before"], each["after"]) for each in evaluated] == [(losses[0], losses[0])] * 2


@pytest.mark.parametrize("use", ["other", "predicts"])
def test_a_process_with_other_data_stops_an_evaluation(evaluated, use):
    assert [each[use] for each in evaluated] == ["ExactError"] * 2


def test_what_the_first_process_writes_reaches_the_others_before_an_evaluation(evaluated, losses):
    assert losses[0] != losses[1]
    assert [(each["written"], each["last"]) for each in evaluated] == [(losses[1], losses[1])] * 2


@pytest.mark.parametrize("moment", ["batch_end", "epoch_end"])
def test_a_callback_that_calls_the_trainer_stops_all(world, moment):
    for ((kind, *words),) in said(world, moment):
        assert kind == "ExactError"
        assert "but every process must make the same calls in the same order." in " ".join(words)


@pytest.mark.parametrize(
    "failure, own, others",
    [
        # in a step
        ("if index: Dense.backward = None", "TypeError", r"Process 1 failed in this step"),
        # between steps
        ("if index: raise ValueError('the script fails')", "ValueError: the script fails", r"LockstepError"),
        ("if index: os.kill(os.getpid(), 9)", "", r"LockstepError"),
    ],
)
def test_a_process_that_fails_ends_the_others(tmp_path, failure, own, others):
    text = script(fails=STEP + failure) + "\ntry:\n    " + STEP + "except lockstep.LockstepError as error:\n"
    text += "    print('LockstepError', error, file=sys.stderr)\n    raise\n"
    with together(text, tmp_path, by_hand(2)) as scripts:
        first, second = endings(scripts)
    assert second[0] != 0
    assert own in second[2]
    assert first[0] == 1
    assert others in first[2]


def test_a_signal_to_one_process_saves_the_run_of_all_and_a_plain_run_takes_it_up(world, alone, folder):
    assert [code for code, _, _ in world] == [0, 0], world
    assert "stopped by SIGTERM after step 6, saved in told" in world[0][2]
    assert all("told" not in stories for _, stories, _ in world)
    resumed = by_story(outputs(script(told=SAVED + 'train("told")'), folder))
    assert resumed["told"] == alone["whole"]


def test_a_launched_world_takes_up_a_plain_run(world, alone):
    assert alone["begun"] != alone["whole"]
    assert said(world, "begun") == [alone["whole"]] * 2


def test_a_callback_that_fails_in_the_first_process_ends_the_fit_of_all(world):
    (failed, *first), (peer, *second) = said(world, "failing")
    assert " ".join(failed) == "failed ValueError the callback's own"
    assert " ".join(peer).startswith("failed PeerFailed Process 0 failed before agree")
    assert first == second  # and they can go on together
    assert len(first) == 1


def test_what_callbacks_did_to_the_model_is_in_every_process(world, alone):
    assert said(world, "callbacks") == [alone["callbacks"]] * 2
