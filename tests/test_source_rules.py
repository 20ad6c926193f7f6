"""The mechanical part of the style rules: names, words, lengths of files, and access to frameworks.

docs/glossary.md says which word to use instead. The tables at the top list what is not clean yet; an entry that is no
longer needed fails, so the tables can only shrink.
"""

import ast
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
FRAMEWORKS = {"torch", "jax", "flax", "optax", "tensorflow", "keras", "mxnet"}
MAX_LINES = 300

# Words in docstrings, comments and messages, and what to write instead.
BANNED = {
    r"told|tells": "says, shows, returns",
    r"odds": "probabilities",
    r"nests?": "pytree",
    r"whole numbers?": "integer",
    r"wakes?|awake": "is initialized",
    r"berth|freight|guests?|crew|sown|abreast|hands": "the field's noun",
    r"somebody|nobody|everybody|stranger|strangers": "which process or object it is",
    r"anew": "again",
    r"lies|lie": "is",
    r"travels?": "is sent, is pickled",
    r"torn": "damaged",
    r"mend": "fix",
    r"hears?|breath": "notices, life",
}
# Function names that do not say what the function does: participles and prepositions.
NO_VERBS = {
    *("of", "told", "kept", "made", "found", "held", "known", "shown", "numbered", "weighed", "located", "sealed"),
    *("moved", "taken", "joined", "packed", "opened", "checked", "counted", "named", "stepped", "marked", "alone"),
}

# Public classes that several files define, and why.
SAME_NAMES = {"CrossEntropy": "one public name and one set of arguments, on JAX and on MXNet"}

# Files outside of backends/ that may ask whether a framework was imported.
MAY_ASK_FOR_FRAMEWORKS = {
    "processes/jax_rendezvous.py": "whether jax.distributed was initialized; nothing may be imported to find out",
    "processes/rendezvous.py": "whether a process group of torch or Ray exists; nothing may be imported to find out",
}


def parse(file):
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def find_functions(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def find_texts(source, tree):
    """Yields the comments, docstrings and strings of a file. Doctests are code, and left out."""
    lines = iter(source.splitlines(keepends=True))
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"(?m)^ *(>>>|\.\.\.).*$", "", node.value)


def find_framework_questions(tree):
    """Yields the frameworks that are looked up in `sys.modules` by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            parts = [node.slice] if ast.unparse(node.value) == "sys.modules" else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = node.args if ast.unparse(node.func.value) == "sys.modules" else []
        elif isinstance(node, ast.Compare):
            parts = [node.left] if any(ast.unparse(each) == "sys.modules" for each in node.comparators) else []
        else:
            parts = []
        for part in parts:
            if isinstance(part, ast.Constant) and str(part.value).partition(".")[0] in {*FRAMEWORKS, "ray"}:
                yield part.value


@pytest.mark.parametrize("file", FILES)
def test_function_names_are_verbs(file):
    assert [name for name in find_functions(parse(file)) if name.lstrip("_") in NO_VERBS] == []


@pytest.mark.parametrize("file", FILES)
def test_banned_words(file):
    source = (SOURCE / file).read_text(encoding="utf-8")
    found = [
        (match.group(), instead)
        for text in find_texts(source, ast.parse(source))
        for word, instead in BANNED.items()
        for match in re.finditer(rf"\b({word})\b", text, re.IGNORECASE)
    ]
    assert found == []


@pytest.mark.parametrize("file", FILES)
def test_files_are_at_most_300_lines_long(file):
    assert len((SOURCE / file).read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_a_public_class_name_is_used_once():
    files = defaultdict(list)
    for file in FILES:
        for node in parse(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(file)
    doubled = {name: places for name, places in files.items() if len(places) > 1 and name not in SAME_NAMES}
    assert doubled == {}


@pytest.mark.parametrize("file", FILES)
def test_frameworks_are_looked_up_by_backends_only(file):
    if not file.startswith("backends/") and file not in MAY_ASK_FOR_FRAMEWORKS:
        assert list(find_framework_questions(parse(file))) == []


def test_the_tables_have_no_entries_that_are_not_needed():
    missing = [path for path in MAY_ASK_FOR_FRAMEWORKS if not any(f.startswith(path) for f in FILES)]
    assert missing == []
    assert all(list(find_framework_questions(parse(file))) for file in MAY_ASK_FOR_FRAMEWORKS)


def test_the_glossary_names_what_to_write_instead():
    glossary = (SOURCE.parents[1] / "docs" / "glossary.md").read_text(encoding="utf-8")
    for word in ("odds", "nest", "whole number", "made anew", "told"):
        assert word in glossary


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("sys.modules['torch']", ["torch"]),
        ("sys.modules.get('jax._src.distributed')", ["jax._src.distributed"]),
        ("'torch' not in sys.modules", ["torch"]),
        ("sys.modules.get(name), sys.modules['json']", []),
    ],
)
def test_lookups_of_frameworks_are_found(source, expected):
    assert list(find_framework_questions(ast.parse(source))) == expected


def test_texts_are_found():
    source = '"""Odds.\n\n>>> nobody\n"""\nx = 1  # anew\nraise E(f"told {x}")\n'
    assert [text.strip() for text in find_texts(source, ast.parse(source))] == ["# anew", "Odds.", "told"]
