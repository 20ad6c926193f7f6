"""Customs: the script's own functions and classes in a model's configuration, carried along as they are.

A configuration names a function or a class and leaves it to the reader to find it. A worker
finds Keras's own. Everything else gets a name of its own while the configuration is
written, and travels beside it under that name; lambdas too, for Keras's own way with them loses
the names that they use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.saving import object_registration
from keras.src.saving.serialization_lib import SafeModeScope
from keras.src.utils import python_utils


class Customs(dict[str, Any]):
    """What is carried, by name."""

    def name(self, each: Any) -> str:
        """The name under which it is carried."""
        for name, known in self.items():
            if known is each:
                return name
        name = f"script>{each.__name__}_{len(self)}"
        self[name] = each
        return name


@contextmanager
def collected() -> Iterator[Customs]:
    """Inside, what configurations name and Keras does not have is collected."""
    found = Customs()
    with (
        _replaced(object_registration, "GLOBAL_CUSTOM_NAMES", _Names(found)),
        _replaced(python_utils, "func_dump", lambda function: (found.name(function), None, None)),
    ):
        yield found


@contextmanager
def known(customs: Customs) -> Iterator[None]:
    """Inside, configurations find what was carried."""

    def load(code: Any, *rest: Any, **more: Any) -> Any:
        return customs[code if isinstance(code, str) else code[0]]

    # A worker trusts what its own script has sent.
    with keras.saving.custom_object_scope(customs), SafeModeScope(False), _replaced(python_utils, "func_load", load):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, another object of this name."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class _Names(dict[Any, str]):
    """A name for everything that is not Keras's own."""

    def __init__(self, customs: Customs) -> None:
        super().__init__(object_registration.GLOBAL_CUSTOM_NAMES)
        self._customs = customs

    def __contains__(self, each: object) -> bool:
        return is_script_s(each) or super().__contains__(each)

    def __getitem__(self, each: Any) -> str:
        return self._customs.name(each) if is_script_s(each) else super().__getitem__(each)


def is_script_s(each: Any) -> bool:
    """Whether a class or a function is the script's own, not Keras's."""
    return str(getattr(each, "__module__", None)).partition(".")[0] not in ("keras", "builtins")
