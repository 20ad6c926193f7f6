"""Ports of scripts with other packages' models, optimizers and metrics: `make test-scripts`, outside of `make test`."""

import os
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the models are created from configurations
os.environ.setdefault("NPROC", "64")  # as Lockstep sets it before JAX is initialized

if find_spec("transformers") is None:  # not in .venv-scripts
    collect_ignore_glob = ["*"]
