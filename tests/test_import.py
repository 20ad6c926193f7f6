"""`import lockstep` is light: no framework, no plots, a blink."""

import json
import subprocess
import sys
from types import ModuleType

import lockstep

HEAVY = {"torch", "jax", "flax", "optax", "tensorflow", "keras", "mxnet", "matplotlib"}

SCRIPT = """
import json, sys, time
start = time.thread_time()
import lockstep
print(json.dumps([time.thread_time() - start, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_import_is_quick_and_brings_no_framework():
    times = []  # of the importing thread alone: others may be at work
    for _ in range(6):
        output = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout
        seconds, modules = json.loads(output)
        assert "lockstep" in modules
        assert HEAVY.isdisjoint(modules)
        times.append(seconds)
    assert min(times) < 0.3


def test_all_is_exactly_the_public_names():
    public = {name for name in dir(lockstep) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(lockstep, name), ModuleType)}
    assert len(lockstep.__all__) == len(set(lockstep.__all__))
    assert set(lockstep.__all__) - modules == public - modules
    assert set(lockstep.__all__) <= public
