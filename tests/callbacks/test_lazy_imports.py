"""Callbacks are there at once: what is heavy is imported when a run begins that uses it."""

import subprocess
import sys

from lockstep import callbacks

HEAVY = {"rich", "matplotlib", "tensorboard", "google", "IPython", "torch"}


def test_heavy_packages_are_not_imported() -> None:
    script = (
        "import sys, lockstep.callbacks as c; "
        "c.TensorBoard('a'), c.Plot('b'), c.CSVLogger('c'), c.Log(print), c.EMA(0.9), c.EarlyStopping(); "
        f"print(sorted({HEAVY!r} & {{name.partition('.')[0] for name in sys.modules}}))"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout == "[]\n"


def test_all_names_can_be_imported() -> None:
    assert len(callbacks.__all__) == len(set(callbacks.__all__))
    for name in callbacks.__all__:
        assert getattr(callbacks, name).__name__ == name
