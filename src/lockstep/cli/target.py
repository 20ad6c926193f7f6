"""Target: the function in a user's file that makes what is to be verified."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from lockstep.errors import ModelError

MODULE = "lockstep_target"
"""The file's name as a module; its own name may be taken, by the standard library's `test` for one."""


def load(text: str) -> Callable[..., Any]:
    """The function that `FILE.py:FUNCTION` names.

    The file is imported, so what stands under `if __name__ == "__main__"` is left
    out. What it defines goes to the workers by value: they need not find the file.
    """
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise ModelError(
            f"A function is named as FILE.py:FUNCTION. Got {text!r}. Use for example train.py:make_trainer."
        )
    if not Path(path).is_file():
        raise ModelError(f"The file must be there. Got {path!r}, which is none. Use for example train.py:make_trainer.")
    module = _module(Path(path).resolve())
    function = getattr(module, name, None)
    if not callable(function):
        raise ModelError(f"{path} must define a function {name!r}. It does not. Use one of: {_functions(module)}.")
    result: Callable[..., Any] = function
    return result


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as Python does for a script; workers are given the same path
    arguments = sys.argv
    sys.argv = [str(path)]  # the command line is ours; a script that reads its own finds no arguments
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    cloudpickle.register_pickle_by_value(module)
    return module


def _functions(module: Any) -> str:
    own = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == MODULE]
    return ", ".join(own) or "(it defines none)"
