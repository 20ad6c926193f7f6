"""The figures of the documentation are what their scripts draw."""

import subprocess
import sys
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[2] / "docs/figures"


@pytest.mark.parametrize("script", sorted(FIGURES.glob("*.py")), ids=lambda script: script.stem)
def test_the_script_draws_the_figure(script, tmp_path):
    subprocess.run([sys.executable, script, tmp_path / "figure.svg"], check=True, timeout=60)
    assert (tmp_path / "figure.svg").read_bytes() == script.with_suffix(".svg").read_bytes()
