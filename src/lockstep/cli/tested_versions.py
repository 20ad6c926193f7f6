"""The oldest and the newest version of each package that Lockstep was tested with, and how versions compare.

The oldest are the lower bounds in pyproject.toml, the newest the versions in constraints.txt. A test compares them.
"""

import importlib.metadata
import platform
import re
from collections.abc import Sequence

TESTED = {
    "Python": ("3.11", "3.13"),
    "numpy": ("1.23.5", "2.4.6"),
    "ml_dtypes": ("0.5.0", "0.6.0"),
    "cloudpickle": ("3.0.0", "3.1.2"),
    "rich": ("13.0.0", "15.0.0"),
    "typer": ("0.15.4", "0.29.0"),
    "torch": ("2.11.0", "2.13.0"),
    "jax": ("0.8.0", "0.10.2"),
    "flax": ("0.12.0", "0.12.8"),
    "optax": ("0.2.6", "0.2.8"),
    "tensorflow": ("2.21.0", "2.21.0"),
    "keras": ("3.13.0", "3.15.1"),
    "mxnet": ("1.9.1", "1.9.1"),
}


def find_version(package: str) -> str | None:
    """Returns the version of an installed package, or of Python; None if it is not installed. Imports nothing.

    >>> find_version("numpy") is None, find_version("no-such-package")
    (False, None)
    """
    if package == "Python":
        return platform.python_version()
    for name in (package, f"{package}-cpu"):  # TensorFlow has a distribution without GPUs
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def describe_versions(packages: Sequence[str]) -> tuple[str, str]:
    """Returns the installed versions of packages as text, and advice on those that were not tested.

    >>> describe_versions(["no-such-package"])
    ('no-such-package', '')
    """
    texts, advice = [], []
    for package in packages:
        version, bounds = find_version(package), TESTED.get(package)
        texts.append(f"{package} {version}" if version else package)
        order = compare_version(version, bounds) if version and bounds else 0
        if order and bounds:
            way = "older than the oldest" if order < 0 else "newer than the newest"
            advice.append(f"{package} {version} is {way} version that was tested, {bounds[order > 0]}.")
    if advice:
        advice.append("It may work; lockstep verify shows whether its bits are equal.")
    return ", ".join(texts), " ".join(advice)


def compare_version(version: str, bounds: tuple[str, str]) -> int:
    """Returns -1 if a version is older than the oldest, 1 if it is newer than the newest, and 0 in between.

    The newest stands for all of its patch releases.

    >>> compare_version("2.13.0+cpu", ("2.11.0", "2.13.0")), compare_version("2.13.2", ("2.11.0", "2.13.0"))
    (0, 0)
    >>> compare_version("2.9.1", ("2.11.0", "2.13.0")), compare_version("2.14.0rc1", ("2.11.0", "2.13.0"))
    (-1, 1)
    """
    oldest, newest = map(_parse, bounds)
    found = _parse(version)
    if found < oldest:
        return -1
    return 1 if found[:2] > newest[:2] else 0


def _parse(version: str) -> tuple[int, ...]:
    """Returns the numbers of a release, without what follows them."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()
