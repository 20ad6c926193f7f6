"""Frameworks are tested one at a time: LOCKSTEP_BACKENDS names those of this run (`numpy,torch` unless it is set).

What belongs to another framework, as its folder or file says, is not collected.
"""

import os
import signal
import warnings

# Before torch is imported. A thread of OpenMP that waits for work keeps its core busy, and where processes share the
# cores a test takes twenty times as long; how it waits changes no bit.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A background job and nohup ignore Ctrl-C, and children inherit that. Tests send it, so it acts as in a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)

CHOSEN = os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")
OTHERS = {"torch", "jax", "tensorflow", "keras", "mxnet", "toy"} - {*CHOSEN}

collect_ignore_glob = [pattern for name in OTHERS for pattern in (f"*/{name}/*", f"*/{name}.py", f"*/*_{name}.py")]

if "mxnet" in CHOSEN:  # with its warnings held back: it uses names that NumPy 1.23 is about to drop
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mxnet  # noqa: F401
