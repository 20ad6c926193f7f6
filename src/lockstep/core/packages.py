"""Distinguishes installed packages from the script's own modules, and describes the versions of packages."""

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

_FOLDERS = {"site-packages", "dist-packages"}


@functools.cache
def is_installed(module: str) -> bool:
    """Returns whether a module belongs to the standard library or to an installed package that has a version.

    >>> is_installed("numpy.random"), is_installed("__main__")
    (True, False)
    """
    top = module.partition(".")[0]
    if top in ("__main__", "__mp_main__", ""):
        return False
    return _is_standard(top) or top == "lockstep" or (_is_in_packages(top) and _version(top) != "")


def describe_package(module: str) -> str:
    """Returns the name and version of a module's package, or a hash of the file if the module is in no package.

    >>> describe_package("numpy.random").startswith("numpy ")
    True
    """
    top = module.partition(".")[0]
    if _is_standard(top):
        return f"{top} {platform.python_implementation()} {platform.python_version()}"
    file = getattr(sys.modules.get(module), "__file__", None)
    if is_installed(module) or file is None:
        return f"{top} {_version(top)}"
    return f"{module} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}"


def _is_standard(top: str) -> bool:
    """Returns whether `top` is a module of the standard library, and not a module of the script with the same name."""
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    is_own = file.endswith(".py") and not Path(file).is_relative_to(Path(os.__file__).parent)
    return top in sys.stdlib_module_names and not is_own


def _is_in_packages(top: str) -> bool:
    module: Any = sys.modules.get(top)
    places = [getattr(module, "__file__", None) or "", *map(str, getattr(module, "__path__", ()))]
    return any(_FOLDERS & set(Path(place).parts) for place in places)


@functools.cache
def _version(top: str) -> str:
    """Returns the version of a package; an empty text if the package has no version."""
    version = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(version, str):
        return version
    import importlib.metadata  # imported here, because it is slow and few scripts need it

    names = importlib.metadata.packages_distributions().get(top, ())
    return " ".join(sorted(importlib.metadata.version(name) for name in set(names)))
