import sys

import pytest


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """A loaded script puts its folder on the path; the test's copy goes with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def script(tmp_path):
    """Writes train.py and gives its path."""

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write
