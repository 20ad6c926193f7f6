"""Every file in examples/ runs, in seconds, as a user starts it."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def digests(path, folder, launcher=(), arguments=()):
    # torchrun sets one thread unless told; the threads per shard are part of the result.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    small = ["-c", SMALL] if "fashion_mnist" in path.read_text(encoding="utf-8") else []
    command = [sys.executable, *launcher, *small, str(path), *arguments]
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


def test_a_folder_of_keras_files_goes_on_with_the_same_bits_on_any_number_of_devices(tmp_path):
    script = ROOT / "examples" / "keras_files.py"
    found = []
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]):
        folder = tmp_path / str(len(devices))
        folder.mkdir()
        found += digests(script, folder, arguments=devices)
        assert sorted(path.name for path in (folder / "ckpt").iterdir()) == [f"ckpt-{n}.keras" for n in range(1, 5)]
    assert len(set(found)) == 1


def test_the_newest_keras_file_is_that_of_the_largest_number(tmp_path):
    """ckpt-10 comes after ckpt-9, though not in the alphabet."""
    text = (ROOT / "examples" / "keras_files.py").read_text(encoding="utf-8")
    functions = text[text.index("def make_or_restore_model") : text.index("(x, y), test")]
    for number in (9, 10, 2):
        (tmp_path / "ckpt").mkdir(exist_ok=True)
        (tmp_path / "ckpt" / f"ckpt-{number}.keras").touch()
    names = {"keras": SimpleNamespace(models=SimpleNamespace(load_model=lambda path: path.name)), "Path": Path}
    exec(functions, names)
    with contextlib.chdir(tmp_path):
        assert names["make_or_restore_model"]() == ("ckpt-10.keras", 10)


def test_the_readme_shows_the_example_as_it_is():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / "examples" / "train.py").read_text(encoding="utf-8") in readme


def test_the_page_of_checkpoints_shows_the_guides_training_as_it_is():
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    guide = (ROOT / "examples" / "keras_guide.py").read_text(encoding="utf-8")
    training = guide[guide.index("def run_training") : guide.index("print(trainer.evaluate")]
    assert training in page
