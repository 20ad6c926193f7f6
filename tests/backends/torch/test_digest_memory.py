"""A digest takes the memory of one array, not of the state."""

import subprocess
import sys

SCRIPT = """
import gc
import torch
from torch import nn
import lockstep

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=1) as trainer:
    trainer.step((torch.ones(4, 1024), torch.zeros(4, dtype=torch.long)), verbose=0)
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
    before = peak()
    trainer.digest()
    print((peak() - before) / net[0].weight.nbytes)
"""


def test_a_digest_copies_one_array_at_a_time():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 4, "of the 64 arrays of 4 MB"
