"""Every file in examples/ runs, in seconds, as a user starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    {*(ROOT / "examples").glob("*.py")} - {*(ROOT / "examples").glob("*_mxnet.py")}
)  # its own tests run it


# Fashion-MNIST's shapes without its files, and a hundredth of its validation: what an example prints differs, that it
# runs does not.
SMALL = """
import sys
import numpy as np
import lockstep.datasets

def images(count):
    generator = np.random.default_rng(count)
    return generator.integers(0, 256, (count, 28, 28), dtype=np.uint8), generator.integers(0, 10, count)

lockstep.datasets.fashion_mnist = lambda: (images(600), images(200))
del sys.argv[0]
text = open(sys.argv[0], encoding="utf-8").read()
assert "10_000" in text
exec(compile(text.replace("10_000", "100"), sys.argv[0], "exec"), {"__name__": "__main__"})
"""


def digests(path, folder, launcher=()):
    # torchrun sets one thread unless told; the threads per shard are part of the result.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    small = ["-c", SMALL] if "fashion_mnist" in path.read_text(encoding="utf-8") else []
    command = [sys.executable, *launcher, *small, str(path)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    found = re.findall(r"[0-9a-f]{64}", result.stdout)  # two processes may print on one line
    assert result.returncode == 0, result.stdout + result.stderr
    assert found, result.stdout + result.stderr
    return found


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name != "train.py"], ids=lambda path: path.name)
def test_it_runs(path, tmp_path):
    assert len(digests(path, tmp_path)) == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_needs_no_guard(path):
    assert "__main__" not in path.read_text(encoding="utf-8")


def test_a_launcher_changes_nothing(tmp_path):
    """Nor does the number of devices: that is the demo's test, of the same script."""
    train = ROOT / "examples" / "train.py"
    (one,) = digests(train, tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert digests(train, tmp_path, launcher=torchrun) == [one, one]


def test_the_readme_shows_the_example_as_it_is():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / "examples" / "train.py").read_text(encoding="utf-8") in readme


def test_the_page_of_checkpoints_shows_the_guides_training_as_it_is():
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    guide = (ROOT / "examples" / "keras_guide.py").read_text(encoding="utf-8")
    training = guide[guide.index("def run_training") : guide.index("print(trainer.evaluate")]
    assert training in page
