"""Settings: what of TensorFlow's process-wide state can change bits.

Whoever holds a variable has woken TensorFlow, and its threads can no longer be set.
They are read, checked against what the run was given, and saved with it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import tensorflow as tf
from tensorflow.python.framework import config
from tensorflow.python.util import _pywrap_util_port

from lockstep.backends.base import Work
from lockstep.errors import PlanError


@cache
def num_threads() -> int:
    """The threads among which TensorFlow divides one operation; it is awake, so they stay as they are."""
    chosen: int = tf.config.threading.get_intra_op_parallelism_threads()
    return chosen or len(os.sched_getaffinity(0))


def uses_onednn() -> bool:
    """Return whether TensorFlow computes with oneDNN in this process."""
    return bool(_pywrap_util_port.IsMklEnabled())


def read_versions(device: str) -> dict[str, str]:
    """Return what decides the bits on a device: versions, threads, oneDNN, and on a GPU its model and its libraries."""
    versions = {
        "tensorflow": tf.__version__,
        "keras": tf.keras.__version__,
        "TensorFlow's intra-op threads": str(num_threads()),
        "oneDNN": "on" if uses_onednn() else "off",  # TF_ENABLE_ONEDNN_OPTS, when TensorFlow was imported
    }
    if not device.startswith("cpu"):
        gpu = tf.config.list_physical_devices("GPU")[int(device.partition(":")[2] or 0)]
        build = tf.sysconfig.get_build_info()
        versions["device model"] = str(tf.config.experimental.get_device_details(gpu).get("device_name"))
        versions["CUDA"], versions["cuDNN"] = str(build.get("cuda_version")), str(build.get("cudnn_version"))
    return versions


@contextmanager
def computing(work: Work, exact: bool) -> Iterator[None]:
    """Inside, operations have deterministic forms; afterwards the switch is where the script had it."""
    if not exact:
        yield
        return
    _check_threads(work)
    before = config.is_op_determinism_enabled()
    config.enable_op_determinism()
    try:
        yield
    finally:
        if not before:
            config.disable_op_determinism()


def _check_threads(work: Work) -> None:
    """Refuses threads that were asked for and cannot be had any more."""
    there = num_threads()
    if work.threads not in (there, max(1, there // work.num_shards)):
        raise PlanError(
            f"TensorFlow's threads are set before it wakes, and a model in hand means that it is awake. Got "
            f"threads={work.threads}; TensorFlow has {there}. Leave threads out, or begin the script with "
            f"tf.config.threading.set_intra_op_parallelism_threads({work.threads})."
        )
