"""Backends of other packages: found through entry points, as pip leaves them in a folder of `sys.path`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lockstep
from lockstep.backends import registry
from lockstep.cli.app import app
from lockstep.errors import ModelError

TOY = Path(__file__).parent / "toy"
SOURCE = Path(lockstep.__file__).parents[1]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a package with these entry points, and these modules by name."""

    def install(package, version="1.0", modules=(), **points):
        folder = tmp_path / package
        info = folder / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[lockstep.backends]\n{lines}")
        for name, text in dict(modules).items():
            (folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))

    return install


def instance(module, *bases):
    """An array of a class that this module defines."""
    return type("Array", bases, {"__module__": module, "shape": (2,)})()


def run(*command, path):
    """What a Python process with these folders on its path prints."""
    result = subprocess.run(
        [sys.executable, *command],
        env={"PYTHONPATH": ":".join(map(str, path)), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


SCRIPT = """
import numpy as np
import lockstep
import toynet

generator = np.random.default_rng(0)
shapes = {"0.weight": (6, 7), "0.bias": (7,), "1.weight": (7, 8), "1.bias": (8,)}
weights = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
x, y = generator.standard_normal((61, 6)), generator.integers(0, 8, 61)

if __name__ == "__main__":
    for devices in (1, 2, 3):
        model = toynet.Dense(weights, dropout=0.5)
        optimizer = toynet.SGD(model.parameters, 0.1, 0.9)
        with lockstep.wrap(model, optimizer, toynet.CrossEntropy(), devices=devices, shards=8) as trainer:
            assert len(trainer.devices) == devices
            trainer.fit((x, y), epochs=2, batch_size=29, verbose=0)
            print(trainer.digest())
"""


def test_an_installed_backend_trains_in_this_process_and_in_workers(tmp_path):
    shutil.copytree(TOY, tmp_path / "packages", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "train.py").write_text(SCRIPT)
    digests = run(str(tmp_path / "train.py"), path=[SOURCE, tmp_path / "packages"]).splitlines()
    assert len(digests) == 3
    assert len(set(digests)) == 1


def test_entry_points_are_not_read_for_a_framework_of_ours():
    script = (
        "import sys, numpy, lockstep\n"
        "from lockstep.backends.numpy import SGD, Dense\n"
        "trainer = lockstep.wrap(Dense([2, 2], seed=0), SGD(0.1), 'mse')\n"
        "trainer.step((numpy.ones((4, 2)), numpy.ones((4, 2))))\n"
        "lockstep.allreduce([numpy.ones(2), numpy.ones(2)])\n"
        "print('importlib.metadata' in sys.modules)\n"
    )
    assert run("-c", script, path=[SOURCE]).splitlines()[-1] == "False"


def test_the_package_that_defines_the_class_or_a_base_of_it_decides(install):
    install("lockstep-some", somenet="lockstep_some", **{"somenet.graphs": "lockstep_some.graphs"})
    for module, backend in [
        ("somenet", "lockstep_some"),
        ("somenet.layers.dense", "lockstep_some"),
        ("somenet.graphs.nodes", "lockstep_some.graphs"),
        ("somenetwork", None),
    ]:
        assert registry.find_array_backend(instance(module)) == backend
    model = instance("somenet.layers")
    assert registry.find_backend(model) == "lockstep_some"
    assert registry.find_backend(instance("__main__", type(model))) == "lockstep_some"
    assert registry.find_backend((lambda variables, x: x, {"w": [model]})) == "lockstep_some"


def test_a_framework_of_ours_keeps_its_backend(install):
    install("lockstep-other", lockstep="lockstep_other", numpy="lockstep_other")
    from lockstep.backends.numpy import Dense

    model = Dense([2, 2], seed=0)
    assert registry.find_backend(model) == "lockstep.backends.numpy"
    assert registry.find_array_backend(model.parameters["0.weight"]) == "lockstep.backends.numpy"


def test_a_model_without_a_backend_is_refused(install):
    install("lockstep-some", somenet="lockstep_some")
    with pytest.raises(ModelError, match=r"or of a framework whose backend is installed\. Got othernet\.Array\. Give"):
        lockstep.wrap(instance("othernet"))


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        ({}, "ModuleNotFoundError: No module named 'lockstep_some'"),
        ({"lockstep_some": "import no_such_module"}, "ModuleNotFoundError: No module named 'no_such_module'"),
        ({"lockstep_some": "raise RuntimeError('no driver')"}, "RuntimeError: no driver"),
    ],
)
def test_a_backend_that_cannot_be_imported_names_its_package(install, modules, why):
    install("lockstep-some", "2.5", modules, somenet="lockstep_some")
    with pytest.raises(ModelError) as raised:
        lockstep.wrap(instance("somenet"))
    assert str(raised.value) == (
        "The backend for 'somenet' is lockstep_some of the package lockstep-some 2.5, and lockstep_some cannot be "
        f"imported: {why}. Install what is missing, or another version of that package."
    )
    assert raised.value.__cause__ is not None


def test_a_backend_without_array_functions_names_its_package(install):
    install("lockstep-plain", modules={"lockstep_plain": ""}, plainnet="lockstep_plain")
    with pytest.raises(ModelError, match=r"of the package lockstep-plain 1\.0, and lockstep_plain\.array_ops cannot"):
        lockstep.allreduce([instance("plainnet")] * 2)


def test_two_packages_that_claim_one_framework_are_refused(install):
    install("lockstep-some", somenet="lockstep_some")
    install("somenet-lockstep", "3.1", somenet="somenet.backend")
    with pytest.raises(ModelError) as raised:
        lockstep.wrap(instance("somenet"))
    assert str(raised.value) == (
        "2 installed packages have a backend for 'somenet': lockstep-some 1.0 (lockstep_some) and "
        "somenet-lockstep 3.1 (somenet.backend). Uninstall all but one of these packages."
    )


def test_two_packages_that_name_one_module_agree(install):
    install("lockstep-some", somenet="lockstep_some")
    install("lockstep-some-nightly", somenet="lockstep_some")
    assert registry.find_backend(instance("somenet")) == "lockstep_some"


def test_devices_lists_an_installed_backend_once(install):
    backend = "available = lambda: ['npu:0', 'npu:1']"
    modules = {"lockstep_some": backend, "somenet": "__version__ = '0.7'", "somelib": ""}
    install("lockstep-some", modules=modules, somenet="lockstep_some", somelib="lockstep_some")
    assert registry.list_outside() == {"somelib": "lockstep_some"}
    result = CliRunner().invoke(app, ["devices"])
    assert result.exit_code == 0, result.output
    assert "npu:0, npu:1" in result.output
    assert "2 replicas: npu:0, npu:1" in result.output
