"""The example for MXNet, as a user starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[3] / "examples" / "train_mxnet.py"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The digest and what came before it, by number of contexts."""
    found = {}
    for count in (1, 3):
        folder = tmp_path_factory.mktemp("example")
        command = [sys.executable, str(TRAIN), *["cpu"] * count]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        *lines, digest = result.stdout.split("\n")[:-1]
        found[count] = lines, digest
    return found


def test_the_example_learns(printed):
    lines, _ = printed[3]
    assert lines[0].startswith("3 devices (cpu:0, cpu:1, cpu:2), 4 shards of 64, batch 256, ")
    assert float(lines[-1].split()[2].rstrip(",")) >= 0.97


def test_the_example_gives_the_same_digest_on_any_number_of_contexts(printed):
    digests = {digest for _, digest in printed.values()}
    assert len(digests) == 1
    assert len(digests.pop()) == 64
