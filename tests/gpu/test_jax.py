"""JAX on a GPU: the same bits in one process and in the next, whatever XLA's autotuner has found there."""

import json
import os
import subprocess
import sys

import pytest

from lockstep.backends.jax import available

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason="JAX has no GPU here")]

SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import numpy as np
from parity import jax_models as models
made = {{"lenet": (models.lenet, models.images), "resnet": (models.resnet, models.small_images)}}
make, data = made[{name!r}]
if {tuned}:  # by the clock, at the same shapes: XLA remembers it
    make(None, shards={shards}, precision={precision!r}, exact=False).step(data(256))
models.GENERATOR = np.random.Generator(np.random.PCG64(1))
trainer = make(None, shards={shards}, precision={precision!r})
assert trainer.devices[0].startswith("cuda"), trainer.devices
digests = []
for size in (256, 61):
    trainer.step(data(size))
    digests.append(trainer.digest())
print(json.dumps(digests))
"""


def start(**case):
    script = SCRIPT.format(tests=__file__.rpartition("/gpu")[0], **case)
    small = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several share the GPU
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", script], env=small, **pipes)


def digests(process):
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize(("name", "precision"), [("lenet", None), ("resnet", None), ("resnet", "bf16")])
def test_a_second_process_gives_the_same_bits(name, precision, shards):
    case = {"name": name, "precision": precision, "shards": shards}
    first, second, tuned = map(digests, [start(tuned=own, **case) for own in (False, False, True)])
    assert first == second == tuned
