"""docs/new-backend.md: its code is that of the toy backend, and Lockstep makes the calls that it lists."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lockstep
from docs.test_snippets import snippets

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests/backends/toy"
PAGE = "docs/new-backend.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")


def run(*command):
    """What a process prints in which the toy framework and its backend are installed."""
    path = ":".join(map(str, (Path(lockstep.__file__).parents[1], TOY)))
    result = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


def test_the_script_gives_one_digest_on_one_and_two_devices(tmp_path):
    script, *_ = snippets(PAGE)
    digests = []
    for devices in (1, 2):
        (tmp_path / "train.py").write_text(script.replace("devices=2", f"devices={devices}"))
        digests.append(run(str(tmp_path / "train.py")).splitlines()[-1])
    assert digests[0] == digests[1]
    assert re.fullmatch("[0-9a-f]{64}", digests[0])


def test_the_code_of_the_step_is_the_toy_backends():
    _, *excerpts = snippets(PAGE)
    text = (TOY / "lockstep_toynet/backend.py").read_text(encoding="utf-8")
    assert len(excerpts) == 3
    assert all(excerpt in text for excerpt in excerpts)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_calls_are_those_that_are_made(devices):
    printed = run(str(Path(__file__).parent / "print_calls_toy.py"), str(devices))
    lines = [line for line in printed.splitlines() if f" device{'s' * (devices > 1)} (" not in line]
    assert lines == blocks("text")[devices - 1].splitlines()


def test_the_entry_point_is_the_installed_one():
    (text,) = blocks("toml")
    (points,) = tomllib.loads(text)["project"]["entry-points"].values()
    installed = (TOY / "lockstep_toynet-1.0.dist-info/entry_points.txt").read_text(encoding="utf-8")
    assert installed == "[lockstep.backends]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())


def test_the_lines_are_those_of_the_files():
    rows = re.findall(r"^\| \[`(lockstep_toynet/\w+\.py)`\]\(.*?\) \| (\d+) \|", TEXT, re.M)
    assert len(rows) == 4
    for name, lines in rows:
        assert len((TOY / name).read_text(encoding="utf-8").splitlines()) == int(lines)
