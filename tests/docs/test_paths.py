"""Files that README, CONTRIBUTING and the pages name are there, and so are the targets of their links."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
PAGES.remove(ROOT / "CHANGELOG.md")  # tells of files that are gone
FOLDERS = (".ci", "src", "tests", "docs", "examples", "benchmarks")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
USERS_OWN = {"train.py", "check.py", "t.py"}  # in commands that a reader is to type


def named_files(text):
    return re.findall(r"`([\w/.-]+\.py)`", text)


def links(text):
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.M | re.S)  # nets["critic"](x) is no link
    return [target for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]*)?\)", text) if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_and_links_exist(page):
    text = page.read_text(encoding="utf-8")
    assert [name for name in named_files(text) if name not in USERS_OWN and not _is_there(name)] == []
    assert [target for target in links(text) if not (page.parent / target).exists()] == []


def _is_there(name):
    return any(f"/{file}".endswith(f"/{name}") for file in FILES)


def test_a_file_that_is_gone_is_seen():
    assert not _is_there("core/no_such_file.py")
    assert _is_there("core/tree.py")
    assert named_files("see `core/tree.py`") == ["core/tree.py"]
    assert links("[a](docs/a.md#part) [b](https://example.org) [`c`](c.md)") == ["docs/a.md", "c.md"]
    assert links('`f["a"](x)`\n```python\ng["a"](y)\n```\n[b](b.md)') == ["b.md"]


def test_the_mxnet_extra_takes_a_numpy_that_mxnet_can_be_imported_with():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert "numpy<1.24" in extras["mxnet"]


def test_what_the_makefile_tests_exists():
    """Else pytest would end before its first test, in a lane that is not run every day."""
    lanes = [
        f"test-{name}" for name in ("torch", "core", "jax", "tensorflow", "mxnet", "scripts", "browser", "launchers")
    ]
    printed = subprocess.run(["make", "--dry-run", *lanes], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {word.rpartition("=")[2] for word in printed.split() if re.match(r"(--ignore=)?(tests|src)/", word)}
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
