"""Which folder may import which. An `ast` walk, so an import inside a function counts too."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
FRAMEWORKS = {"torch", "jax", "flax", "optax", "tensorflow", "keras", "mxnet"}
# A backend knows neither the loop nor how many devices there are.
ABOVE_THE_SEAM = "lockstep.training lockstep.processes lockstep.core.plan"
# A backend packs its own model for the workers.
SEAM = "cloudpickle ml_dtypes lockstep.errors lockstep.core lockstep.backends.base lockstep.backends.pickling"
SEAM += " lockstep.backends.change_detector"
# Of Keras's optimizers and losses, without Keras: TensorFlow's own variables and functions go with them too.
KERAS = "lockstep.backends.keras_optimizer_state lockstep.backends.keras_losses"


@dataclass(frozen=True)
class ImportRule:
    """What the files whose path begins with `path` may import beside the standard library."""

    path: str
    may: str
    never: str = ""
    types: str = ""  # what may be imported for annotations alone

    def allows(self, name):
        root = name.partition(".")[0]
        return not within(name, self.never) and (root in sys.stdlib_module_names or within(name, self.may))


RULES = [  # the first that fits a file is its rule
    ImportRule(
        "core/",
        "numpy ml_dtypes lockstep.errors lockstep.core",
        never="time datetime",
        types="lockstep.backends.array_ops",
    ),
    ImportRule("backends/numpy", f"numpy {SEAM} lockstep.backends.numpy", never=ABOVE_THE_SEAM),
    ImportRule("backends/torch", f"torch numpy {SEAM} lockstep.backends.torch", never=ABOVE_THE_SEAM),
    ImportRule("backends/jax", f"jax flax optax numpy {SEAM} lockstep.backends.jax", never=ABOVE_THE_SEAM),
    ImportRule(
        "backends/tensorflow", f"tensorflow numpy {SEAM} {KERAS} lockstep.backends.tensorflow", never=ABOVE_THE_SEAM
    ),
    ImportRule("backends/mxnet", f"mxnet numpy {SEAM} lockstep.backends.mxnet", never=ABOVE_THE_SEAM),
    # Keras may use the three that it runs on.
    ImportRule("backends/keras", f"keras jax tensorflow torch numpy {SEAM} lockstep.backends", never=ABOVE_THE_SEAM),
    # To choose is to know them all; a framework is only looked for among the modules already imported.
    ImportRule("backends/registry.py", "numpy lockstep.errors lockstep.core lockstep.backends", never=ABOVE_THE_SEAM),
    ImportRule("backends/", f"numpy {SEAM}", never=ABOVE_THE_SEAM),
    ImportRule(
        "exchange/",
        "torch numpy lockstep.errors lockstep.exchange lockstep.launch.shm lockstep.launch.environment "
        "lockstep.backends.base lockstep.core.host_groups lockstep.core.lateness "
        "lockstep.core.tree lockstep.core.plan lockstep.core.layout lockstep.core.metrics lockstep.core.types "
        "lockstep.core.shard_sums",
    ),
    # Backends only through the seam and by choice, never a framework itself; of training only the step that all make.
    ImportRule(
        "processes/",
        "cloudpickle lockstep.errors lockstep.devices lockstep.core lockstep.backends.base lockstep.backends.registry "
        "lockstep.exchange lockstep.launch lockstep.data lockstep.processes lockstep.training.step",
    ),
    ImportRule(
        "training/",
        "numpy lockstep.errors lockstep.devices lockstep.core lockstep.backends.base lockstep.exchange.base "
        "lockstep.launch lockstep.data lockstep.checkpoint lockstep.callbacks lockstep.display lockstep.processes "
        "lockstep.training",
    ),
    # Input: arithmetic on positions, the script's own code, and processes to run it in. No backend, no model.
    ImportRule(
        "data/",
        "numpy cloudpickle lockstep.errors lockstep.core lockstep.data lockstep.launch",
    ),
    ImportRule(
        "checkpoint/",
        "numpy ml_dtypes lockstep.errors lockstep.core lockstep.checkpoint lockstep.backends.base",
    ),
    ImportRule("launch/", "cloudpickle lockstep.errors lockstep.launch lockstep.core.plan"),
]


def within(name, prefixes):
    """Whether the dotted name is one of the prefixes or lies inside one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes.split())


def tree(file):
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def imports(tree, file="core/x.py"):
    """Every imported name in full: `from lockstep.core import tree` gives `lockstep.core.tree`."""
    package = ["lockstep", *Path(file).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*base, *([node.module] if node.module else []), alias.name]) for alias in node.names)


def annotations(tree):
    """The branches that only a type checker reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield ast.Module(node.body, [])


def environment(tree):
    """Every use of the process's environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("os", "posix"):
            yield from {node.attr} & names
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            yield from {alias.name for alias in node.names} & names


def name_tests(tree):
    """Every comparison that asks a backend for its name."""
    for node in ast.walk(tree):
        subjects = (
            [node.left, *node.comparators]
            if isinstance(node, ast.Compare)
            else [node.subject]
            if isinstance(node, ast.Match)
            else []
        )
        for subject in subjects:
            if isinstance(subject, ast.Attribute) and subject.attr == "name" and "backend" in ast.unparse(subject):
                yield ast.unparse(subject)


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_what_its_rule_allows(file):
    rule = next((rule for rule in RULES if file.startswith(rule.path)), None)
    if rule:
        refused = [name for name in imports(tree(file), file) if not rule.allows(name)]
        for branch in annotations(tree(file)):
            for name in imports(branch, file):
                if name in refused and within(name, rule.types):
                    refused.remove(name)
        assert refused == []


@pytest.mark.parametrize("file", FILES)
def test_frameworks_stay_behind_the_seam(file):
    if not file.startswith("backends/") and file != "exchange/torch_distributed.py":
        assert FRAMEWORKS.isdisjoint(name.partition(".")[0] for name in imports(tree(file), file))


@pytest.mark.parametrize("file", FILES)
def test_one_file_touches_the_environment(file):
    assert bool(list(environment(tree(file)))) == (file == "launch/environment.py")


@pytest.mark.parametrize(
    "file", ["trainer.py", "wrap.py", *(file for file in FILES if file.startswith(("training/", "processes/")))]
)
def test_the_top_reaches_backends_through_the_seam(file):
    backends = {name for name in imports(tree(file), file) if within(name, "lockstep.backends")}
    assert {name for name in backends if not within(name, "lockstep.backends.base lockstep.backends.registry")} == set()
    assert list(name_tests(tree(file))) == []


@pytest.mark.parametrize("path", [rule.path for rule in RULES])
def test_every_rule_has_a_file(path):
    assert any(file.startswith(path) for file in FILES)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import os.path, numpy as np", ["os.path", "numpy"]),
        ("from lockstep.core import tree, plan", ["lockstep.core.tree", "lockstep.core.plan"]),
        ("from .tree import fold", ["lockstep.core.tree.fold"]),
        ("from . import tree", ["lockstep.core.tree"]),
        ("from ..backends import base", ["lockstep.backends.base"]),
        ("def f():\n    import torch", ["torch"]),
    ],
)
def test_imports_are_read_in_full(source, names):
    assert list(imports(ast.parse(source))) == names


@pytest.mark.parametrize(
    ("path", "name", "allowed"),
    [
        ("core/", "numpy.typing.NDArray", True),
        ("core/", "lockstep.backends.base", False),
        ("core/", "time.monotonic", False),
        ("core/", "torch", False),
        ("backends/torch", "torch.nn", True),
        ("backends/torch", "jax", False),
        ("backends/torch", "lockstep.backends.jax", False),
        ("backends/torch", "lockstep.core.layout.Layout", True),
        ("backends/torch", "lockstep.training.loop.Loop", False),
        ("exchange/", "lockstep.training.step", False),
        ("launch/", "lockstep.core.plan.Plan", True),
        ("launch/", "lockstep.core.planet", False),  # a prefix ends at a dot
        ("launch/", "numpy", False),
        ("data/", "lockstep.launch.shm", True),
        ("data/", "lockstep.backends.base", False),
        ("data/", "lockstep.training.step.Member", False),
        ("processes/", "lockstep.data.reader", True),
        ("processes/", "lockstep.training.step.Member", True),
        ("processes/", "lockstep.training.session", False),
        ("training/", "lockstep.backends.torch", False),
        ("checkpoint/", "lockstep.training.fit", False),
    ],
)
def test_the_table(path, name, allowed):
    assert next(rule for rule in RULES if rule.path == path).allows(name) == allowed


@pytest.mark.parametrize(
    "source", ["os.environ['A']", "from os import getenv", "os.putenv('A', '1')", "dict(os.environ)"]
)
def test_the_environment_is_seen(source):
    assert list(environment(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    ["if backend.name == 'torch': pass", "x = 'a' != self.backend.name", "match backend.name:\n    case _: pass"],
)
def test_a_question_for_the_name_is_seen(source):
    assert list(name_tests(ast.parse(source)))
