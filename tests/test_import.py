"""`import lockstep` is light: no framework, no plots, few modules."""

import json
import subprocess
import sys
from types import ModuleType

import lockstep

HEAVY = {"torch", "jax", "flax", "optax", "tensorflow", "keras", "mxnet", "matplotlib"}

SCRIPT = """
import json, sys
import numpy
before = set(sys.modules)
import lockstep
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_brings_no_framework_and_few_modules():
    """Seconds depend on the machine's load and stand in `benchmarks/import_time.py`; modules are what takes them."""
    output = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout
    modules = json.loads(output)
    others = [name for name in modules if name.partition(".")[0] != "lockstep"]
    assert "lockstep" in modules
    assert HEAVY.isdisjoint({name.partition(".")[0] for name in others})
    assert len(others) < 100


def test_all_is_exactly_the_public_names():
    public = {name for name in dir(lockstep) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(lockstep, name), ModuleType)}
    assert len(lockstep.__all__) == len(set(lockstep.__all__))
    assert set(lockstep.__all__) - modules == public - modules
    assert set(lockstep.__all__) <= public
