"""No file uses the private names of another."""

import ast
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
PRIVATE = (
    "trainer.py",
    "wrap.py",
    "training/",
    "processes/",
    "checkpoint/",
)  # whose files use no private names of others
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def is_private(name):
    """Whether the name belongs to its class or module alone; `__init__` and the like are Python's."""
    return name.startswith("_") and not name.endswith("__")


def own_names(tree):
    """The private attributes and functions that the classes of a module define, and its own private names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_receiver(node.value):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def is_receiver(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names_of_others(tree):
    """Every use of a private name that the module does not define: `trainer._team`, `from forward import _gather`."""
    own = set(own_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_receiver(node.value) and node.attr not in own:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if is_private(alias.name))


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith(PRIVATE)])
def test_a_file_uses_no_private_name_of_another(file):
    assert list(private_names_of_others(ast.parse((SOURCE / file).read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A:\n    def f(self, trainer):\n        return trainer._team", ["trainer._team"]),
        ("from lockstep.training.fit import _Fit", ["_Fit"]),
        ("import forward\nforward._gather()", ["forward._gather"]),
        ("class A:\n    def f(self):\n        return self._x.y", []),
        ("class A:\n    def f(self):\n        return self.x._y", ["self.x._y"]),
        # Two objects of one class know each other.
        ("class A:\n    def __init__(self, other):\n        self._x = other._x", []),
        ("class A:\n    _x: int\n    def f(self, other):\n        return other._x", []),
        ("super().__init__(__name__)", []),
    ],
)
def test_a_private_name_is_seen(source, names):
    assert list(private_names_of_others(ast.parse(source))) == names
