"""The collectives on a GPU that stands for two: copies, pieces and sums lie there, with numpy's bits."""

import importlib
from importlib.util import find_spec

import numpy as np
import pytest

import lockstep
from lockstep.core import tree

DEVICES = ["cuda:0", "cuda:0"]
X = np.random.default_rng(3).standard_normal((5, 3)).astype("float32")


FRAMEWORKS = [name for name in ("torch", "jax") if find_spec(name)]
MODULES = {name: importlib.import_module(f"lockstep.backends.{name}") for name in FRAMEWORKS}
pytestmark = pytest.mark.gpu


@pytest.fixture(params=FRAMEWORKS)
def kit(request):
    if not MODULES[request.param].available():
        pytest.skip("this framework has no GPU here")
    return importlib.import_module(f"collectives.kits.{request.param}").KITS[request.param]


def host(array):
    return array.detach().cpu().numpy() if hasattr(array, "detach") else np.asarray(array)


def test_copies_and_pieces_lie_on_the_gpu(kit):
    replicas = lockstep.replicate(kit.params(X), DEVICES)
    pieces = lockstep.split(kit.array(X), DEVICES)
    assert [kit.place(array) for array in (*replicas, *pieces)] == DEVICES * 2
    assert pieces.sizes == [3, 2]
    assert b"".join(host(piece).tobytes() for piece in pieces) == X.tobytes()


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_sums_have_the_trees_bits_wherever_the_arrays_lie(kit, num_devices):
    values = [X * np.float32(10.0**power) for power in range(num_devices)]
    given = [lockstep.split(kit.array(value), ["cuda:0"])[0] for value in values]
    expected = tree.fold(values, np.add).tobytes()
    assert [host(each).tobytes() for each in lockstep.allreduce(given)] == [expected] * num_devices


def test_a_sum_over_two_kinds_of_devices_ends_on_each(kit):
    given = [kit.array(X), lockstep.split(kit.array(X), ["cuda:0"])[0]]
    sums = lockstep.allreduce(given)
    assert [kit.place(each) for each in sums] == [kit.place(each) for each in given]
    assert {host(each).tobytes() for each in sums} == {(X + X).tobytes()}
