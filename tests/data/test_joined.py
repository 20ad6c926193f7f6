"""Launched processes: each reads its own shards of a pipeline, and the bits are those of one process."""

import pytest

from integration.scripts import running, together
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

train = arrays(x, y).map(noisy, random=True).batch(int(os.environ.get(f"BATCH{index}", 60)))
trainer = lockstep.wrap(Dense([11, 9, 4], seed=1, dtype="float32"), SGD(0.1), "cross_entropy", shards=8)
try:
    trainer.fit(train, verbose=0)
    print("result", len(trainer.devices), trainer.digest(), len(seen))
    trainer.fit(arrays(x, y).shuffle(1).batch(60).prefetch(2), verbose=0)
    print("result", len(trainer.devices), trainer.digest(), 0)
except lockstep.LockstepError as error:
    print("result", type(error).__name__, error)
"""


def test_each_process_reads_its_own_shards(tmp_path):
    with running(SCRIPT, tmp_path) as script:
        code, stdout, stderr = script.end()
    assert code == 0, stderr
    ((one, *first), (_, *second)) = results(stdout)
    assert (one, first[1]) == ("1", "150")
    with together(SCRIPT, tmp_path, by_hand(2)) as scripts:
        ends = endings(scripts)
    counts = []
    for code, stdout, stderr in ends:
        assert code == 0, stderr
        ((two, digest, count), (_, *later)) = results(stdout)
        assert (two, digest) == ("2", first[0])
        assert later == second
        counts.append(int(count))
    assert sum(counts) == 150
    assert max(counts) < 90


def test_another_pipeline_in_one_of_them_stops_the_run(tmp_path):
    variables = [{**each, "BATCH1": "61"} for each in by_hand(2)]
    with together(SCRIPT, tmp_path, variables) as scripts:
        for code, stdout, stderr in endings(scripts):
            assert code == 0, stderr
            ((kind, *words),) = results(stdout)
            assert kind == "ExactError"
            assert "process 1 came with other data" in " ".join(words)
