"""SIGTERM to a process group: a loader's workers die of it, and the run is saved all the same."""

import os
import re
import signal

import pytest

from integration.run_script import running

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import os, torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3

class Say(lockstep.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.trainer.num_steps in (2, 9):
            print("step", flush=True)

    def on_test_begin(self, logs=None):
        print("test", flush=True)

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Linear(8, 3)
    options = {"num_workers": 2}
    if os.environ["KIND"] == "persistent":
        options["persistent_workers"] = True
    if os.environ["KIND"] == "spawn":
        options = {"num_workers": 1, "multiprocessing_context": "spawn"}  # which imports all of this again
    loader = DataLoader(Data(), 8, shuffle=True, **options)
    validation = DataLoader(Data(), 30, num_workers=1)
    devices = int(os.environ["DEVICES"])
    trainer = lockstep.wrap(net, torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), devices=devices, shards=4)
    trainer.fit(loader, epochs=2, validation_data=validation, checkpoint="saved", verbose=0, callbacks=[Say()])
    print("digest", trainer.digest(), trainer.num_steps)
"""


def end(script):
    code, out, err = script.end()
    return code, [line for line in out.splitlines() if line.startswith("digest")], err


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The digest of a run that nobody stops. How the loader starts its workers changes no bit of it."""
    with running(SCRIPT, tmp_path_factory.mktemp("whole"), KIND="fork", DEVICES="1") as script:
        code, digest, err = end(script)
    assert code == 0, err
    return digest


@pytest.mark.parametrize(
    ("kind", "devices", "moment", "times"),
    [("fork", "2", "step", 1), ("persistent", "2", "test", 2), ("spawn", "1", "step", 1)],
)
def test_a_signal_to_the_group_is_answered_by_a_save_and_the_next_start_goes_on(
    kind, devices, moment, times, expected, tmp_path
):
    with running(SCRIPT, tmp_path, KIND=kind, DEVICES=devices) as script:
        while script.line() != moment:
            pass
        for _ in range(times):
            os.killpg(script.process.pid, signal.SIGTERM)
        code, digest, err = end(script)
    assert (code, digest) == (0, []), err
    assert re.search(r"stopped by SIGTERM after step \d+, saved in saved; the same command continues", err), err
    with running(SCRIPT, tmp_path, KIND=kind.replace("spawn", "fork"), DEVICES="1") as script:  # spawn takes seconds
        code, digest, err = end(script)
    assert (code, digest) == (0, expected), err
