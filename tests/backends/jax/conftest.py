"""Before JAX wakes, for all tests of this process, what Lockstep sets; a test would otherwise leave it behind."""

import os

os.environ.setdefault("NPROC", "64")
