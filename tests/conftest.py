"""A test leaves nothing behind: no process, thread, shared memory or environment variable.

What a fixture of wider scope holds was there before the test and is not counted. Reading /proc costs
some tens of microseconds a test; only a suspect waits, up to the grace period, for an end under way.
"""

import gc
import multiprocessing.resource_tracker
import os
import threading
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from forked_workers import EVERY_WORKER, KERAS_WORKER, TORCH_WORKER, Template

# Before TensorFlow is imported: oneDNN in 2.21 corrupts memory on convolutions of odd batches.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# How long an example takes depends on what else the machine does. pytest's timeout ends one that hangs.
settings.register_profile("any_load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_load")

# Tracing makes many small objects: with the standard library's 700 a test of TensorFlow spends a seventh of its time on
# the search for garbage.
gc.set_threshold(50_000, 20, 100)

# By which this process's descendants are known when their parents have ended.
MARK = "LOCKSTEP_TESTS_OF"
os.environ[MARK] = str(os.getpid())

BACKENDS = os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")
TORCH_FOLDERS = {"backends", "integration", "parity", "test_torch.py"}

GRACE_SECONDS = 10.0
# For the life of the process: of the test runner, of torch when it first uses CUDA or its compiler, of JAX's and
# TensorFlow's imports and XLA's pool of threads.
LASTING = {
    *("PYTEST_CURRENT_TEST", "CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR"),
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # an address, which torch sets before it loads compiled code
    *("TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY", "NPROC"),
    *("ENABLE_RUNTIME_UPTIME_TELEMETRY", "HDF5_PLUGIN_PATH", "TF2_BEHAVIOR"),
    *("TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION"),
}


@pytest.fixture(autouse=True, scope="module")
def freeze_imported_modules():
    """What was imported by now stays. A search for garbage would take tenths of a second to look at all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def templates():
    """A function that returns the template of workers that import these modules."""
    with ExitStack() as stack:

        @cache
        def start(modules):
            template = Template(modules, LASTING)
            stack.callback(template.close)
            return template

        yield start


@pytest.fixture(autouse=True, scope="module")
def forked_workers(request, templates):
    """Workers are copies of one process, which has the framework that most workers of these tests use."""
    if os.environ.get("KERAS_BACKEND") == "torch":
        modules = KERAS_WORKER
    elif "torch" in BACKENDS and TORCH_FOLDERS & {*request.path.parts}:
        modules = TORCH_WORKER
    else:
        modules = EVERY_WORKER
    with templates(modules).in_use():
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    before = held()
    processes = pids()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while left := sorted((held() - before) | {f"process {child}" for child in children(pids() - processes)}):
        left = [what for what in left if not belongs_to_another_program(what)]
        if not left:
            break
        if time.monotonic() > deadline:
            pytest.fail("A test leaves nothing behind. This one left:\n  " + "\n  ".join(left))
        gc.collect()
        time.sleep(0.01)


def held():
    """What this process holds, by name."""
    return {*threads(), *memory(), *(f"variable {name}={value}" for name, value in variables().items())}


def threads():
    return {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate() if not thread.daemon}


def variables():
    return {name: value for name, value in os.environ.items() if name not in LASTING}


def memory():
    """Named shared memory of this machine, and Lockstep's unnamed in this process.

    Not the semaphores of Python's multiprocessing: Lockstep makes none, and those that stay are of a process that was
    killed, which may have been any program's of this machine.
    """
    for name in os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ():
        if not name.startswith("sem.mp-"):
            yield f"shared memory /dev/shm/{name}"
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if "memfd:lockstep" in target:
            yield f"shared memory {target} (descriptor {descriptor})"


def belongs_to_another_program(what):
    """Whether it is named shared memory that some other program of this machine uses."""
    name = what.removeprefix("shared memory ")
    return name.startswith("/dev/shm/") and any(maps(pid, name) for pid in pids() if not is_ours(pid))


def maps(pid, name):
    """Whether the process maps the file."""
    try:
        return name in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended, or is another user's
        return False


def is_ours(pid):
    """Whether the process is this one or comes from it, be its parent alive or not."""
    if pid == os.getpid():
        return True
    try:
        if f"{MARK}={os.getpid()}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return True
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return parent > 1 and is_ours(parent)


def pids():
    """Every process of this machine; none where there is no /proc."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} if os.path.isdir("/proc") else set()


def children(candidates):
    """Those of the candidates that are this process's children, dead but not reaped ones too."""
    tracker = multiprocessing.resource_tracker._resource_tracker._pid  # the standard library keeps it to the end
    for pid in candidates - {tracker}:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent, *_ = rest.split()
        if int(parent) == os.getpid():
            yield f"{name}) {state}"
