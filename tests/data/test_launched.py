"""Launched processes: each reads its own shards of a pipeline, and the bits are those of one process."""

import pytest

from integration.run_script import running, together
from integration.test_launched import by_hand, endings, results

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import os, random, sys
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.data import arrays

index = int(os.environ.get("RANK", 0))
generator = np.random.default_rng(1)
x, y = generator.standard_normal((150, 11)).astype("float32"), generator.integers(0, 4, 150)
seen = set()

def noisy(x, y):
    seen.add(x.tobytes())
    return x + np.float32(random.random()), y

trainer = lockstep.wrap(Dense([11, 9, 4], seed=1, dtype="float32"), SGD(0.1), "cross_entropy", shards=8)
trainer.fit(arrays(x, y).map(noisy, random=True).batch(60), verbose=0)
print("result", len(trainer.devices), trainer.digest(), len(seen))
trainer.fit(arrays(x, y).shuffle(1).batch(60).prefetch(2), verbose=0)
print("result", len(trainer.devices), trainer.digest())
try:
    trainer.fit(arrays(x, y).map(noisy, random=True).batch(60 + index), verbose=0)
except lockstep.LockstepError as error:
    print("result", type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What each of two processes says of its three fits."""
    with together(SCRIPT, tmp_path_factory.mktemp("world"), by_hand(2)) as scripts:
        ends = endings(scripts)
    assert [code for code, _, _ in ends] == [0, 0], ends
    return [results(stdout) for _, stdout, _ in ends]


def test_each_process_reads_its_own_shards(world, tmp_path):
    with running(SCRIPT, tmp_path) as script:
        code, stdout, stderr = script.end()
    assert code == 0, stderr
    ((one, *first), (_, second)) = results(stdout)
    assert (one, first[1]) == ("1", "150")
    counts = []
    for (two, digest, count), later, _ in world:
        assert (two, digest) == ("2", first[0])
        assert later == ["2", second]
        counts.append(int(count))
    assert sum(counts) == 150
    assert max(counts) < 90


def test_a_different_pipeline_in_one_process_stops_the_run(world):
    for *_, (kind, *words) in world:
        assert kind == "ExactError"
        assert "process 1 has other data" in " ".join(words)
