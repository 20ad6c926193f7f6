"""Packages that a process is to do without, though they are installed.

Keras and TensorFlow import what they find beside them, and a process that has no use
for it pays seconds. The promise is the same where it is not there.
"""

import importlib.util
from pathlib import Path

TESTS = Path(__file__).parent


def path(folder, *names):
    """PYTHONPATH for a process with Lockstep and the tests, and without these packages."""
    for name in names:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is left out', name='{name}')\n")
    source = Path(importlib.util.find_spec("lockstep").origin).parents[1]
    return f"{folder}:{source}:{TESTS}"
