"""Devices are created before JAX is initialized, or again if that is safe; more of them compile no more."""

import collections
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import lockstep
from backends.kits import jax as kit
from lockstep.backends.jax import compile_cache, devices
from lockstep.core import host_vectors
from lockstep.errors import DeviceError, ExactError

LOSS = optax.softmax_cross_entropy_with_integer_labels
GENERATOR = np.random.Generator(np.random.PCG64(5))
X = GENERATOR.standard_normal((61, 6)).astype(np.float32)
Y = GENERATOR.integers(0, 3, 61)

compiled = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **more: compiled.update([name.rpartition("/")[2]])
)


class Net(nnx.Module):
    """Two layers."""

    def __init__(self):
        self.first = nnx.Linear(6, 16, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(16, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def compiles(count):
    """Returns the numbers of compilations in the first step and in the second."""
    trainer = lockstep.wrap(Net(), optax.adam(0.1), LOSS, metrics=["accuracy"], devices=count, shards=8)
    assert len(trainer.devices) == count <= len(jax.devices("cpu"))
    found = []
    for _ in range(2):
        compiled.clear()
        trainer.step((X, Y))
        found.append(compiled["backend_compile_duration"])
    return found


def test_the_number_of_compilations_does_not_depend_on_devices():
    """61 examples in 8 shards: two sizes of shard, one tree, one update."""
    for count in (1, 8):
        compile_cache._CODES.clear()
        assert compiles(count) == [4, 0]


def test_compiled_programs_are_reused_in_one_process():
    compile_cache._CODES.clear()
    assert compiles(1) == [4, 0]
    assert compiles(8) == [1, 0]  # the tree, which runs over all devices
    assert compiles(8) == [1, 0]


def test_verify_moves_the_replicas_and_restores_the_state():
    trainer = lockstep.wrap(Net(), optax.adam(0.1), LOSS, devices=2, shards=8)
    trainer.step((X, Y))
    before = trainer.digest()
    assert trainer.verify((X, Y), steps=2, devices=(1, 3, 8), batch_size=30).equal
    assert trainer.digest() == before


def test_a_checkpoint_of_four_devices_restores_on_one(tmp_path):
    four = lockstep.wrap(Net(), optax.adam(0.1), LOSS, devices=4, shards=8)
    four.step((X, Y))
    four.save(tmp_path / "one")
    four.step((X, Y))
    alone = lockstep.wrap(Net(), optax.adam(0.1), LOSS, devices=1)
    alone.restore(tmp_path / "one")
    alone.step((X, Y))
    assert alone.digest() == four.digest()


def test_the_thread_pool_has_one_size_for_any_number_of_devices():
    assert devices.read_pool_size() == devices.choose_pool_size() == int(os.environ["NPROC"])
    assert kit.module.variables(["cpu:0"]) == kit.module.variables(["cpu:0"] * 8) == {"NPROC": os.environ["NPROC"]}


def test_one_device_may_have_several_replicas():
    """As `verify` does on a single GPU; here on the first CPU device."""
    backend = kit.module.open(*make_recipe(["cpu:0"]))
    backend._replicas.rows = [0, 0, 0]
    pieces = backend._runner._collect_pieces(
        type("Work", (), {"pieces": {0: {0: "a", 1: "b"}, 1: {2: "c"}, 2: {3: "d"}}})()
    )
    assert pieces == [{0: "a", 1: "b", 2: "c", 3: "d"}]


def make_recipe(names):
    from lockstep.backends.base import Recipe
    from lockstep.core.options import Options

    return Recipe(Net(), optax.sgd(0.1), LOSS, (), Options()), names


class Dropping(Net):
    """Has random keys too."""

    def __init__(self):
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(super().__call__(x))


def test_returning_to_a_mode_does_not_compile_again():
    model = Dropping()
    trainer = lockstep.wrap(model, optax.sgd(0.1), LOSS, shards=1)

    def step_in_each_mode():
        for turn in (model.eval, model.train):
            turn()
            trainer.step((X, Y), verbose=0)

    step_in_each_mode()
    assert compiled["jaxpr_trace_duration"]
    compiled.clear()
    step_in_each_mode()
    assert not compiled["jaxpr_trace_duration"]


def test_random_keys_and_counters_move_with_the_model(monkeypatch):
    """Otherwise they would prevent JAX's devices from being created again."""
    model = Dropping()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    found, find = [], devices.find_devices

    def find_and_note(names, exact, own):
        found.extend(map(id, own))
        return find(names, exact, own)

    monkeypatch.setattr(devices, "find_devices", find_and_note)
    keys = [leaf._base_array for leaf in jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.RngKey)))]
    steps = optimizer.step.get_raw_value()
    lockstep.wrap(model, optimizer, LOSS, shards=1)
    assert keys
    assert {id(steps), *map(id, keys)} <= set(found)


def train_on(names):
    """Returns the digest after a few steps on these devices, and the devices of state and outputs."""
    with lockstep.wrap(Dropping(), optax.adam(0.1), LOSS, devices=names, shards=4) as trainer:
        for _ in range(2):
            trainer.step((X, Y))
        replicas = trainer.session.backend._replicas
        return trainer.digest(), [str(each) for each in replicas.executables.devices], str(trainer(X).device)


@pytest.mark.parametrize("names", [["cpu:3"], ["cpu:5", "cpu:2", "cpu:7"]])
def test_a_cpu_device_is_chosen_by_its_number(names):
    digest, _, _ = train_on(["cpu:0"])
    assert len(jax.devices("cpu")) == devices.MIN_CPU_DEVICES
    assert train_on(names) == (digest, names, names[0])
    assert train_on([jax.devices("cpu")[int(name[4:])] for name in names]) == (digest, names, names[0])
    assert devices.read_pool_size() == devices.choose_pool_size()


def test_cpu_devices_do_not_outnumber_the_threads():
    last = devices.choose_pool_size() - 1
    for names in ([f"cpu:{last + 1}"], last + 2):
        refused = rf"^cpu:{last + 1} cannot be used in an exact run\. .* Use devices up to cpu:{last}, or exact=False\."
        with pytest.raises(ExactError, match=refused):
            lockstep.wrap(Net(), optax.sgd(0.1), LOSS, devices=names)


def test_devices_of_two_types_are_refused():
    with pytest.raises(DeviceError, match="All devices must be of the same type"):
        lockstep.wrap(Net(), optax.sgd(0.1), LOSS, devices=["cpu:0", "cuda:0"])


def test_a_missing_device_is_refused():
    with pytest.raises(DeviceError, match="This host has no device"):
        lockstep.wrap(Net(), optax.sgd(0.1), LOSS, devices=["cuda:0"])


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import lockstep
model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
{before}
try:
    trainer = lockstep.wrap(model, optax.sgd(0.1), "mse", devices={count})
    trainer.step((np.ones((8, 6), np.float32), np.ones((8, 3), np.float32)), verbose=0)
    print(len(trainer.devices), float(trainer.model(jnp.ones((1, 6))).sum()) != 0)
    {after}
except lockstep.LockstepError as error:
    print(type(error).__name__, error)
"""


def script(count, before="", after="", **environment):
    own = {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(count=count, before=before, after=after)],
        env={**own, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_initialized_jax_is_initialized_again_and_arrays_stay_valid():
    lines = script(4, "own = jnp.arange(3.0)", "print(float((own + model.bias).sum()))")
    assert lines[0] == "4 True"
    assert float(lines[1]) != 0


def test_cpu_devices_are_created_as_needed():
    lines = script("['cpu:11']", "", "print(len(jax.devices()), model.bias.get_raw_value().devices())")
    assert lines == ["1 True", "12 {CpuDevice(id=11)}"]


def test_a_pool_of_another_size_is_refused():
    """Build scripts use the variable NPROC too."""
    (line,) = script(2, NPROC="4")
    assert line.startswith("ExactError XLA's pool has ")
    assert f"NPROC is set. An exact run needs {devices.choose_pool_size()} threads, because results depend on" in line
    assert line.endswith("Unset NPROC, or use exact=False.")
    assert script("2, exact=False", NPROC="4") == ["2 True"]


def test_arrays_on_a_device_need_jax_to_be_configured_first():
    bound = "own = jax.device_put(jnp.arange(3.0), jax.devices()[0])"
    (line,) = script(4, bound)
    assert line.startswith("DeviceError Lockstep cannot configure JAX's CPU devices and their")
    assert "1 arrays of the script are bound to its devices. Begin the script with this line: import os; os.en" in line
    (line,) = script(1, bound)
    assert line.startswith("ExactError")
    _, _, wanted = line.partition("os.environ.update(")
    given = eval(f"dict({wanted.removesuffix(')')})")
    assert script(4, bound, **given) == ["4 True"]  # the line itself
    assert ExactError.__name__ == "ExactError"


def test_versions_of_a_gpu_include_its_model_and_platform(monkeypatch):
    """Runs without a GPU, with the names that JAX would return."""
    client = SimpleNamespace(platform_version="cuda 12080")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind="NVIDIA H200", client=client)])
    found = devices.read_versions(["cuda:0"])
    assert (found["device model"], found["platform"], found["jax"]) == ("NVIDIA H200", "cuda 12080", jax.__version__)
    assert "XLA's CPU threads" not in found


def test_one_process_allocates_no_partial_sums_on_the_host(monkeypatch):
    """They stay on the devices; only an exchange with other processes needs host memory."""
    monkeypatch.setattr(host_vectors, "create_buffer", lambda *memory: pytest.fail("host memory was allocated"))
    with lockstep.wrap(Net(), optax.adam(0.1), LOSS, devices=2, shards=8) as trainer:
        assert len(trainer.devices) == 2
        assert np.isfinite(trainer.step((X, Y), verbose=0)["loss"])
