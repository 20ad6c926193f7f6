# ruff: noqa: E501, a script stands in one line
"""The hash of code: relevant changes give another hash, and all processes compute the same one."""

import collections
import functools
import os
import random
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from lockstep.core import packages
from lockstep.data import arrays
from lockstep.data.cache_identity import hash_code
from lockstep.errors import BatchError

HELPER = "h(v): return v * {K} if v == 3 else v"
COMPOSE = """
class Compose:
    def __init__(self, functions): self.functions = functions
    def __call__(self, v):
        for each in self.functions: v = each(v)
        return v
"""
# The script, and a module that it imports; K is what changes.
CHANGES = {
    "the body": ("def f(v): return v * {K} if v == 3 else v", ""),
    "a function that is called": (f"def {HELPER}\ndef f(v): return h(v)", ""),
    "called in a comprehension": (f"def {HELPER}\ndef f(v): return [h(u) for u in [v]]", ""),
    "called in a generator": (f"def {HELPER}\ndef g(v): return sum(h(u) for u in [v])\ndef f(v): return g(v)", ""),
    "called in a lambda": (f"def {HELPER}\ndef f(v): return (lambda u: h(u))(v)", ""),
    "a global number": ("K = {K}\ndef f(v): return v * K", ""),
    "a default": ("def f(v, k={K}): return v * k", ""),
    "a keyword's default": ("def f(v, *, k={K}): return v * k", ""),
    "a closure": ("def make(k):\n    def f(v): return v * k\n    return f\nf = make({K})", ""),
    "a partial": ("import functools\ndef g(k, v): return v * k\nf = functools.partial(g, {K})", ""),
    "an attribute": ("class A:\n    def __init__(self, k): self.k = k\n    def __call__(self, v): return v * self.k\nf = A({K})", ""),
    "an attribute of a class": ("class A:\n    k = {K}\n    def __call__(self, v): return v * self.k\nf = A()", ""),
    "an attribute in slots": ("class A:\n    __slots__ = ['k']\n    def __call__(self, v): return v * self.k\nf = A()\nf.k = {K}", ""),
    "a method": ("class A:\n    def __call__(self, v): return self.h(v)\n    def h(self, v): return v * {K}\nf = A()", ""),
    "a method of a base class": ("class B:\n    def h(self, v): return v * {K}\nclass A(B):\n    def __call__(self, v): return self.h(v)\nf = A()", ""),
    "a property": ("class A:\n    @property\n    def k(self): return {K}\n    def __call__(self, v): return v * self.k\nf = A()", ""),
    "a static method": ("class A:\n    @staticmethod\n    def h(v): return v * {K}\ndef f(v): return A.h(v)", ""),
    "the object of a method": ("class A:\n    def __init__(self, k): self.k = k\n    def m(self, v): return v * self.k\nf = A({K}).m", ""),
    "the object of a built-in method": ("table = {{3: {K}}}\nf = table.get", ""),
    "a function of a module": ("from helper import h\ndef f(v): return h(v)", f"def {HELPER}"),
    "an attribute of a module": ("import helper\ndef f(v): return helper.h(v)", f"def {HELPER}"),
    "a number of a module": ("import helper\ndef f(v): return v * helper.K", "K = {K}"),
    "a module as a value": ("import helper\ndef f(v): return getattr(helper, 'h')(v)", f"def {HELPER}"),
    "imported inside": ("def f(v):\n    import helper\n    return helper.h(v)", f"def {HELPER}"),
    "imported from inside": ("def f(v):\n    from helper import h\n    return h(v)", f"def {HELPER}"),
    "a function in a dict": (f"def {HELPER}\nT = {{{{'h': h}}}}\ndef f(v): return T['h'](v)", ""),
    "a function in a list of an object": (f"{COMPOSE}\ndef {HELPER}\nf = Compose([h])", ""),
    "behind lru_cache": (f"import functools\n@functools.lru_cache\ndef {HELPER}\ndef f(v): return h(v)", ""),
    "behind wraps": (f"import functools\ndef twice(g):\n    @functools.wraps(g)\n    def two(v): return g(g(v))\n    return two\n@twice\ndef {HELPER}\nf = h", ""),
    "an array": ("import numpy as np\nt = np.arange(9)\nt[7] = {K}\ndef f(v): return t[v]", ""),
    "an array of objects": ("import numpy as np\nt = np.array([1, '{K}', None], object)\ndef f(v): return t[v]", ""),
    "a set": ("t = {{1, 'a', {K}}}\ndef f(v): return v in t", ""),
    "an enumeration": ("import enum\nclass E(enum.Enum):\n    k = {K}\ndef f(v): return v * E.k.value", ""),
    "a data class": ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    k: int = {K}\na = A()\ndef f(v): return v * a.k", ""),
    "an ordered dict": ("import collections\nt = collections.OrderedDict(k={K})\ndef f(v): return v * t['k']", ""),
    "a regular expression": ("import re\np = re.compile('{K}')\ndef f(v): return p.sub('', v)", ""),
    "0 and -0.0": ("k = -0.0 if {K} == 2 else 0.0\ndef f(v): return v * k", ""),
    "a number's type": ("k = 2 if {K} == 2 else True + 1.0\ndef f(v): return v * k", ""),
}  # fmt: skip


def defined(source, helper, k, monkeypatch):
    """The function `f` of a script, as a fresh process has it."""
    module = types.ModuleType("helper")
    exec(helper.format(K=k), vars(module))
    monkeypatch.setitem(sys.modules, "helper", module)
    script = {"__name__": "__main__", "__package__": None}
    exec(source.format(K=k), script)
    return script["f"]


@pytest.mark.parametrize("kind", CHANGES)
def test_only_relevant_changes_give_another_hash(kind, monkeypatch):
    source, helper = CHANGES[kind]
    first, same, other = (
        hash_code(defined(text, helper, k, monkeypatch))
        for text, k in ((source, 2), ("\n'words'\nunused = object()\n" + source, 2), (source, 5))
    )
    assert first == same
    assert first != other


SCRIPT = """
import collections, functools, sys
import numpy as np
from lockstep.data import arrays, indexed
from lockstep.data.cache_identity import hash_code
import helper

class Node:
    def __init__(self, names): self.names, self.me = names, self
    def total(self, x): return x + len(self.names) + helper.h(x)

node = Node({"red", "green", "blue", None, 3.0})
table = collections.defaultdict(list, a=[1, 2], b=[node])

def recursive(x, *, kind=print):
    inner = lambda z: recursive(z - 1) if z in {"red", "green", "blue", 1} else node.total(z)
    return [inner(y) for y in (x, len(table), np.float32(2.5))][0] if x > 0 else x

class Data:
    def __init__(self): self.reads = 0
    def __len__(self): return 12
    def __getitem__(self, index):
        self.reads += 1
        return np.float64(recursive(index))

data = Data()
total = sum(batch.sum() for batch in indexed(data).map(lambda x: x * 2).cache("kept").batch(4))
print(hash_code(recursive), data.reads, total)
"""


def run_script(folder, seed):
    (folder / "script.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(f"def {HELPER.format(K=2)}")
    variables = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_an_unchanged_script_reads_its_file_in_a_new_process(tmp_path):
    """Also with another order of sets and other places in memory."""
    hashes, reads, totals = zip(*(run_script(tmp_path, seed) for seed in "123"), strict=True)
    assert len(set(hashes)) == len(set(totals)) == 1
    assert reads == ("12", "3", "3")  # a few are made again and compared


def test_the_state_of_a_generator_does_not_count():
    def make(seed):
        rng, old = np.random.default_rng(seed), random.Random(seed)
        return lambda x: x + rng.normal() + old.random()

    assert hash_code(make(1)) == hash_code(make(2))


def test_the_instructions_that_a_try_covers_count(monkeypatch):
    """The instructions are the same ones; only the table of exceptions differs."""
    inside = "def f(v):\n    try:\n        a = g(v)\n        b = h(a)\n    except ValueError: return 0\n    return b"
    after = "def f(v):\n    try:\n        a = g(v)\n    except ValueError: return 0\n    else: b = h(a)\n    return b"
    one, other = (defined(f"g = h = float\n{text}", "", 2, monkeypatch) for text in (inside, after))
    assert hash_code(one) != hash_code(other)


def test_a_failing_optional_import_is_hashed():
    def f(x):
        try:
            import not_installed_anywhere
        except ImportError:
            return x
        return not_installed_anywhere.g(x)

    assert hash_code(f) == hash_code(f)
    assert next(iter(arrays(np.arange(2)).map(f).batch(2))).tolist() == [0, 1]


def test_objects_that_pickle_finds_by_name():
    torch = pytest.importorskip("torch")
    kinds = [torch.float32, torch.float64, torch.channels_last, np.add, np.multiply]
    hashes = [hash_code(lambda x, kind=kind: (x, kind)) for kind in kinds]
    assert len(set(hashes)) == len(kinds)
    assert hash_code(torch.float32) == hash_code(torch.float)


def test_tensors_count_by_their_bytes():
    torch = pytest.importorskip("torch")

    def make(value, dtype):
        weight = torch.full((3,), value, dtype=dtype, requires_grad=True)
        net = torch.nn.Linear(3, 1)
        with torch.no_grad():
            net.weight.fill_(value)
            net.bias.zero_()
        return lambda x: net(x * weight)

    for dtype in (torch.float32, torch.bfloat16):
        assert hash_code(make(1.0, dtype)) == hash_code(make(1.0, dtype))
        assert hash_code(make(1.0, dtype)) != hash_code(make(2.0, dtype))


def using_a_lock():
    guard = threading.Lock()
    return lambda x: guard and x


def using_a_generator():
    lines = (line for line in ["a"])
    return lambda x: lines and x


def using_eval():
    return lambda x: eval("x")


def using_import_module():
    import importlib

    script = {"__name__": "__main__", "importlib": importlib}
    exec("def f(x): return importlib.import_module('helper').h(x)", script)
    return script["f"]


def using_a_ufunc():
    double = np.frompyfunc(lambda x: 2 * x, 1, 1)
    return lambda x: double(x)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (using_a_lock, "a _thread.lock (found at: the function given to .map > guard)"),
        (using_a_generator, "a builtins.generator (found at: the function given to .map > lines)"),
        (using_eval, "eval(), which using_eval.<locals>.<lambda> calls"),
        (using_import_module, "importlib.import_module()"),
        (using_a_ufunc, "a numpy.ufunc"),
    ],
)
def test_objects_that_cannot_be_compared_need_a_key(make, what, tmp_path):
    function = make()
    with pytest.raises(BatchError, match=re.escape(what)) as caught:
        list(arrays(np.arange(5)).map(function).cache(tmp_path / "kept").batch(5))
    assert str(caught.value).startswith(".cache(path) cannot tell whether ")
    assert 'Use .cache(path, key="1") and change the key after every change of data or code' in str(caught.value)
    assert not list(tmp_path.iterdir())
    if make is not using_import_module:
        list(arrays(np.arange(5)).map(function).cache(tmp_path / "kept", key="1").batch(5))


def test_objects_that_are_nested_too_deeply_need_a_key():
    deep = functools.reduce(lambda inner, _: [inner, object()], range(10_000), [])
    with pytest.raises(BatchError, match=r"is nested too deeply to be compared\. Use \.cache\(path, key="):
        hash_code(deep)


def test_a_key_replaces_the_comparison_of_code(tmp_path):
    def build(key, add):
        changed = arrays(np.arange(9)).map(lambda x: x + (add if x == 2 else 0)).cache(tmp_path / "c", key)
        return next(iter(changed.batch(9)))[2]

    assert build("1", 1) == 3
    assert build("1", 5) == 3  # the key says that it is the same
    assert build("2", 5) == 7
    changed = arrays(np.array([0, 1, 9, 3, 4, 5, 6, 7, 8])).cache(tmp_path / "c", "2").batch(9)
    assert next(iter(changed))[2] == 9  # arrays in memory are compared all the same


@pytest.mark.parametrize(("path", "key"), [(None, "1"), ("kept", 1)])
def test_keys_without_a_path_or_of_another_type_are_refused(path, key):
    with pytest.raises(
        BatchError, match=re.escape(f"Got .cache({path!r}, key={key!r}). Use .cache(), .cache(path), or")
    ):
        arrays(np.arange(3)).cache(path, key)


def test_another_version_of_a_package_gives_another_hash(monkeypatch):
    function = types.FunctionType((lambda x: np.sort(x)).__code__, {"np": np, "__name__": "__main__"})
    before = hash_code(function)
    monkeypatch.setattr(packages, "_version", lambda top: "99.0")
    assert hash_code(function) != before


def test_a_module_of_the_scripts_own_with_a_name_of_the_standard_library(tmp_path, monkeypatch):
    hashes = []
    for k in (2, 3):
        module = types.ModuleType("code")
        module.__file__ = str(tmp_path / "code.py")
        exec(f"K = {k}\ndef h(v): return K * v", vars(module))
        monkeypatch.setitem(sys.modules, "code", module)
        packages.is_installed.cache_clear()
        hashes.append(hash_code(lambda v, h=module.h: h(v)))
    monkeypatch.undo()
    packages.is_installed.cache_clear()
    assert hashes[0] != hashes[1]
    assert packages.is_installed("code")


def test_a_compiled_module_counts_by_its_file(tmp_path, monkeypatch):
    module = types.ModuleType("compiled")
    module.__file__ = str(tmp_path / "compiled.so")
    monkeypatch.setitem(sys.modules, "compiled", module)
    texts = []
    for content in (b"1", b"2"):
        Path(module.__file__).write_bytes(content)
        texts.append(packages.describe_package("compiled"))
    assert texts[0] != texts[1]


def test_sharing_and_cycles():
    one = [1, 2]
    assert hash_code([one, one]) == hash_code([[1, 2], [1, 2]])
    loop = collections.deque()
    loop.append(loop)
    assert hash_code(loop) == hash_code(loop)
