"""Frameworks are tested one at a time: LOCKSTEP_BACKENDS names those of this run (`numpy,torch` unless it is set).

What belongs to another framework, as its folder or file says, is not collected.
"""

import os

CHOSEN = os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")
OTHERS = {"torch", "jax", "tensorflow", "keras", "mxnet"} - {*CHOSEN}

collect_ignore_glob = [pattern for name in OTHERS for pattern in (f"*/{name}/*", f"*/{name}.py", f"*/test_{name}.py")]
