"""Sets the variable that Lockstep sets before JAX is initialized; the leak check would otherwise fail a test for it."""

import os

os.environ.setdefault("NPROC", "64")
