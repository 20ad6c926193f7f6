"""TensorFlow's process-wide settings that can change bits: threads, determinism, versions.

The thread count can only be set before TensorFlow is initialized, and creating a variable initializes TensorFlow. So
Lockstep only compares the thread count with that of the run, and saves it with the run.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import tensorflow as tf
from tensorflow.python.framework import config
from tensorflow.python.util import _pywrap_util_port

from lockstep.core.types import Work
from lockstep.errors import PlanError


@cache
def count_threads() -> int:
    """Returns the number of threads that share one operation; it cannot change, so it is read once."""
    setting: int = tf.config.threading.get_intra_op_parallelism_threads()
    return setting or len(os.sched_getaffinity(0))  # 0: one thread per core


def is_onednn_enabled() -> bool:
    """Returns whether TensorFlow computes with oneDNN in this process."""
    return bool(_pywrap_util_port.IsMklEnabled())


def read_versions(device: str) -> dict[str, str]:
    """Returns what results on a device depend on: versions, threads, oneDNN, and a GPU's model and libraries."""
    versions = {
        "tensorflow": tf.__version__,
        "keras": tf.keras.__version__,
        "TensorFlow's intra-op threads": str(count_threads()),
        "oneDNN": "on" if is_onednn_enabled() else "off",  # TF_ENABLE_ONEDNN_OPTS decided it at the import
    }
    if not device.startswith("cpu"):
        gpu = tf.config.list_physical_devices("GPU")[int(device.partition(":")[2] or 0)]
        build = tf.sysconfig.get_build_info()
        versions["device model"] = str(tf.config.experimental.get_device_details(gpu).get("device_name"))
        versions["CUDA"], versions["cuDNN"] = str(build.get("cuda_version")), str(build.get("cudnn_version"))
    return versions


@contextmanager
def make_deterministic(work: Work, exact: bool) -> Iterator[None]:
    """Makes operations deterministic inside this context if `exact`; restores the script's setting afterwards."""
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
    """Raises PlanError if the run was given a thread count that differs from TensorFlow's."""
    current = count_threads()
    # The second number is what a run records if the script has given no threads.
    if work.threads not in (current, max(1, current // work.num_shards)):
        raise PlanError(
            "TensorFlow's thread count can only be set before TensorFlow is initialized, and creating a model "
            f"initializes it. Got threads={work.threads}, but TensorFlow has {current}. Leave threads out, or begin "
            f"the script with tf.config.threading.set_intra_op_parallelism_threads({work.threads})."
        )
