"""Joining a world: the same script under torchrun, SLURM or its own process group gives the same bits.

Only the first of these trains a torch model; the others train numpy's, since what
is asked of the meeting does not depend on the framework.
"""

import pytest

import lockstep
from integration.scripts import free_port, running, together

pytestmark = pytest.mark.timeout(120)

TORCH = """
import os, torch, lockstep
from torch import nn

torch.manual_seed(int(os.environ.get("RANK", 0)))  # every process starts elsewhere: the first one's state counts
net = nn.Sequential(nn.Linear(11, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 4))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
trainer = lockstep.wrap(
    net, optimizer, nn.CrossEntropyLoss(), metrics=["accuracy"], devices=int(os.environ["DEVICES"]), shards=8
)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(150, 11, generator=generator), torch.randint(4, (150,), generator=generator)
history = trainer.fit((x, y), epochs=2, batch_size=61, validation_data=(x, y))
digest = trainer.digest()
rows = trainer.predict(x[:7]).tobytes().hex()
if int(os.environ.get("RANK", 0)) == 0:
    print("result", len(trainer.devices), digest, history.history["val_loss"][-1].hex(), rows)
"""

HEAD = """
import os, sys, time
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense

index = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
model, optimizer = Dense([11, 9, 4], seed=1 + index, dtype="float32", dropout=0.3), SGD(0.1, momentum=0.9)
generator = np.random.default_rng(1)
x, y = generator.standard_normal((150, 11)).astype("float32"), generator.integers(0, 4, 150)
"""

WRAP = """
trainer = lockstep.wrap(model, optimizer, "cross_entropy", metrics=["accuracy"], shards=8)
"""

FIT = """
trainer.fit((x, y), epochs=2, batch_size=61, validation_data=(x, y))
print("result", len(trainer.devices), trainer.digest())
"""


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


def torchrun(*arguments):
    return ["-m", "torch.distributed.run", *arguments]


def results(stdout):
    """What the processes say of themselves: [devices, digest, ...]."""
    return [line.split()[1:] for line in stdout.splitlines() if line.startswith("result")]


def endings(scripts):
    """Each process's exit code, stdout and stderr."""
    return [script.end() for script in scripts]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The result of the numpy script on one device."""
    with running(HEAD + WRAP + FIT, tmp_path_factory.mktemp("one")) as script:
        code, stdout, stderr = script.end()
    assert code == 0, stderr
    ((devices, digest),) = results(stdout)
    assert devices == "1"
    return digest


def test_torchrun_gives_the_digest_of_a_plain_run(tmp_path):
    found = []
    for devices, command in ((1, []), (2, []), (2, torchrun("--nproc-per-node", "2"))):
        wanted = "1" if command else str(devices)
        with running(TORCH, tmp_path, command=command, DEVICES=wanted) as script:
            code, stdout, stderr = script.end()
        assert code == 0, stderr
        ((count, *values),) = results(stdout)
        assert int(count) == devices
        assert stdout.count("8 shards of 7 or 8, batch 61") == 1  # only the first process prints
        found.append(values)
    assert found[0] == found[1] == found[2]


def test_a_process_group_of_the_scripts_own(tmp_path, one):
    """Three processes and eight shards, so that ranges do not align with the tree."""
    own = "import torch.distributed\ntorch.distributed.init_process_group('gloo')\n"
    with together(HEAD + own + WRAP + FIT, tmp_path, by_hand(3)) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert [results(stdout) for _, stdout, _ in ends] == [[["3", one]]] * 3


def test_slurm(tmp_path, one):
    port = str(free_port())
    variables = [
        {
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(index),
            "SLURM_NTASKS": "2",
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "MASTER_PORT": port,
        }
        for index in range(2)
    ]
    with together(HEAD + WRAP + FIT, tmp_path, variables) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [results(stdout) for _, stdout, _ in ends] == [[["2", one]]] * 2
    assert [stdout.count("8 shards") for _, stdout, _ in ends] == [1, 0]


def test_two_agents_as_two_hosts(tmp_path, one):
    port = str(free_port())
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    command = [torchrun(*meeting, "--node-rank", str(rank)) for rank in range(2)]
    with together(HEAD + WRAP + FIT, tmp_path, [{}, {}], command=command) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [results(stdout) for _, stdout, _ in ends] == [[["2", one]]] * 2
    assert sum(stdout.count("8 shards") for _, stdout, _ in ends) == 1


def test_the_first_process_decides(tmp_path):
    """Its state, its learning rate, its weights and its callbacks; the others follow."""
    story = """
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
    print("result", len(trainer.devices), trainer._run.step, len(history.epoch), trainer.digest())
    """.replace("\n    ", "\n")
    with running(HEAD + WRAP + story, tmp_path) as script:
        code, stdout, stderr = script.end()
    assert code == 0, stderr
    ((_, *alone),) = results(stdout)
    assert alone[:2] == ["5", "1"]
    with together(HEAD + WRAP + story, tmp_path, by_hand(2)) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [results(stdout) for _, stdout, _ in ends] == [[["2", *alone]]] * 2


STEP = "trainer.step((x[:50], y[:50]))\n"


def test_a_process_with_another_batch_stops_all(tmp_path):
    """Other numbers, other examples, another seed: every process says so, and nobody makes the step."""
    text = """
    before = trainer.digest()

    def refused(batch):
        try:
            trainer.step(batch)
        except lockstep.LockstepError as error:
            print("result", type(error).__name__, error)

    changed = x.copy()
    changed[3, 3] += index
    refused((changed[:50], y[:50]))
    refused((x[index:50], y[index:50]))
    trainer._run.seed = index
    refused((x[:50], y[:50]))
    trainer._run.seed = 0
    assert trainer.digest() == before
    """.replace("\n    ", "\n")
    with together(HEAD + WRAP + STEP + text + STEP, tmp_path, by_hand(2)) as scripts:
        ends = endings(scripts)
    for code, stdout, stderr in ends:
        assert code == 0, stderr
        errors = [" ".join(words) for words in results(stdout)]
        assert len(errors) == 3
        for error in errors:
            assert error.startswith(
                "ExactError Every process computes on the same whole batch. In step 1 process 1 came with"
            )


EVALUATE = """
def tell(name, use, *data):
    try:
        said = use(*data)["loss"].hex()
    except lockstep.LockstepError as error:
        said = type(error).__name__
    print("result", name, said, flush=True)

wrong = y.copy()
wrong[-1] = 9  # in a shard of the last process
tell("before", trainer.evaluate, (x, y))
tell("fails", trainer.evaluate, (x, wrong))
tell("after", trainer.evaluate, (x, y))
tell("other", trainer.evaluate, (x + index, y))
tell("predicts", trainer.predict, x[index:])
if index == 0:
    model.parameters["0.weight"] *= 0.5
tell("written", trainer.evaluate, (x, y))
tell("last", trainer.evaluate, (x, y))
"""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """What each of two processes says of its evaluations, by name."""
    with together(HEAD + WRAP + EVALUATE, tmp_path_factory.mktemp("evaluated"), by_hand(2)) as scripts:
        ends = [script.end(timeout=30) for script in scripts]
    assert [code for code, _, _ in ends] == [0, 0], ends
    return [dict(results(stdout)) for _, stdout, _ in ends]


@pytest.fixture(scope="module")
def losses():
    """The losses on one device, with the weights as they are and as the first process writes them."""
    names = {}
    exec(HEAD, names)
    trainer = lockstep.wrap(names["model"], names["optimizer"], "cross_entropy", devices=1, shards=8)
    plain = trainer.evaluate((names["x"], names["y"]))["loss"].hex()
    trainer.model.parameters["0.weight"] *= 0.5
    return plain, trainer.evaluate((names["x"], names["y"]))["loss"].hex()


def test_a_process_that_fails_in_an_evaluation_leaves_the_others_no_result(evaluated, losses):
    assert [said["fails"] for said in evaluated] == ["PeerFailed", "BatchError"]
    assert [(said["before"], said["after"]) for said in evaluated] == [(losses[0], losses[0])] * 2


@pytest.mark.parametrize("use", ["other", "predicts"])
def test_a_process_with_other_data_stops_an_evaluation(evaluated, use):
    assert [said[use] for said in evaluated] == ["ExactError"] * 2


def test_what_the_first_process_writes_reaches_the_others_before_an_evaluation(evaluated, losses):
    assert losses[0] != losses[1]
    assert [(said["written"], said["last"]) for said in evaluated] == [(losses[1], losses[1])] * 2


@pytest.mark.parametrize("moment, call", [("on_train_batch_end", "digest()"), ("on_epoch_end", "evaluate((x, y))")])
def test_a_callback_that_calls_the_trainer_stops_all(tmp_path, moment, call):
    """Callbacks run in the first process alone, so the others would wait or take one message for another."""
    text = f"""
    class Calling(lockstep.Callback):
        def {moment}(self, index, logs=None):
            self.trainer.{call}

    try:
        trainer.fit((x, y), epochs=2, batch_size=61, callbacks=[Calling()], verbose=0)
    except lockstep.LockstepError as error:
        print("result", type(error).__name__, error)
    """.replace("\n    ", "\n")
    with together(HEAD + WRAP + text, tmp_path, by_hand(2)) as scripts:
        ends = [script.end(timeout=30) for script in scripts]
    for code, stdout, stderr in ends:
        assert code == 0, stderr
        ((kind, *words),) = results(stdout)
        assert kind == "ExactError"
        assert " ".join(words).startswith("Every process makes the same calls in the same order.")


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
    text = HEAD + WRAP + STEP + failure + "\ntry:\n    " + STEP + "except lockstep.LockstepError as error:\n"
    text += "    print('LockstepError', error, file=sys.stderr)\n    raise\n"
    with together(text, tmp_path, by_hand(2)) as scripts:
        first, second = endings(scripts)
    assert second[0] != 0
    assert own in second[2]
    assert first[0] == 1
    assert others in first[2]


SAVED = """
import signal

class Batches:
    "An ordinary loader. In the second process a scheduler's signal comes with the third batch of the second epoch."
    read = 0

    def __len__(self):
        return 3

    def __iter__(self):
        for start in range(0, 150, 61):
            Batches.read += 1
            if Batches.read == 6 and index == 1 and sys.argv[1:] == ["told"]:
                signal.raise_signal(signal.SIGTERM)
            yield x[start : start + 61], y[start : start + 61]

trainer.fit(Batches(), epochs=3, checkpoint="ckpt", callbacks=[lockstep.EMA(0.9)], verbose=0)
print("result", len(trainer.devices), trainer.digest())
"""


def test_a_signal_to_one_process_saves_the_run_of_all_and_a_plain_run_takes_it_up(tmp_path):
    script = HEAD + WRAP + SAVED
    with together(script.replace('sys.argv[1:] == ["told"]', "True"), tmp_path, by_hand(2)) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert all("stopped by SIGTERM after step 6, saved in ckpt" in stderr for _, _, stderr in ends[:1])
    with running(script, tmp_path) as resumed:
        code, stdout, stderr = resumed.end()
    assert code == 0, stderr
    (whole_folder := tmp_path / "whole").mkdir()
    with running(script, whole_folder) as whole:
        code, expected, stderr = whole.end()
    assert code == 0, stderr
    assert results(stdout) == results(expected)


def test_a_launched_world_takes_up_a_plain_run(tmp_path):
    script = HEAD + WRAP + SAVED
    with running(script.replace("epochs=3", "epochs=1"), tmp_path) as begun:
        assert begun.end()[0] == 0
    with together(script, tmp_path, by_hand(2)) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    (whole_folder := tmp_path / "whole").mkdir()
    with running(script, whole_folder) as whole:
        _, expected, _ = whole.end()
    ((_, digest),) = results(expected)
    assert [results(stdout) for _, stdout, _ in ends] == [[["2", digest]]] * 2


FAILING = """
class Failing(lockstep.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise ValueError("the callback's own")

try:
    trainer.fit((x, y), epochs=2, batch_size=61, callbacks=[Failing()], verbose=0)
except Exception as error:
    print("failed", type(error).__name__, error)
print("result", len(trainer.devices), trainer.digest())
"""


def test_a_callback_that_fails_in_the_first_process_ends_the_fit_of_all(tmp_path):
    with together(HEAD + WRAP + FAILING, tmp_path, by_hand(2)) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "failed ValueError the callback's own" in ends[0][1]
    assert "failed PeerFailed Every process takes part. Process 0 failed before agree" in ends[1][1]
    assert len({results(stdout)[0][1] for _, stdout, _ in ends}) == 1  # and they can go on together


CALLBACKS = """
ema = lockstep.EMA(0.5)
best = lockstep.EarlyStopping("loss", mode="max", restore_best=True)
trainer.fit((x, y), epochs=2, batch_size=61, callbacks=[ema, best], verbose=2 if index == 0 else 0)
own = trainer._backend.state()["model.0.weight"].data.tobytes().hex()[:32]
with ema.applied():
    averaged = trainer.evaluate((x, y))["loss"].hex()
print("result", own, averaged, trainer.digest())
"""


def test_what_callbacks_did_to_the_model_is_in_every_process(tmp_path):
    with together(HEAD + WRAP + CALLBACKS, tmp_path, by_hand(2)) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    first, second = (results(stdout) for _, stdout, _ in ends)
    assert first == second
    with running(HEAD + WRAP + CALLBACKS, tmp_path) as script:
        _, stdout, _ = script.end()
    assert results(stdout) == first
