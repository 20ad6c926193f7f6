"""Sends the script's functions and classes with a model's configuration, which contains only their names.

A worker finds Keras's own objects by name. All other objects get a new name while the configuration is written, and are
sent with it. This includes lambdas: Keras's own serialization of a lambda loses the variables that the lambda uses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.saving import object_registration
from keras.src.saving.serialization_lib import SafeModeScope
from keras.src.utils import python_utils


class CustomObjects(dict[str, Any]):
    """The functions and classes that are sent with a configuration, by name."""

    def add(self, each: Any) -> str:
        """Adds a function or a class if it is new; returns its name."""
        for name, added in self.items():
            if added is each:
                return name
        name = f"script>{each.__name__}_{len(self)}"
        self[name] = each
        return name


@contextmanager
def collect_objects() -> Iterator[CustomObjects]:
    """Collects the script's functions and classes in all configurations that are written inside this context."""
    collected = CustomObjects()
    with (
        _replace_attribute(object_registration, "GLOBAL_CUSTOM_NAMES", _CustomNames(collected)),
        # Keras's serialization of a lambda is (code, defaults, closure). The name stands in place of the code.
        _replace_attribute(python_utils, "func_dump", lambda function: (collected.add(function), None, None)),
    ):
        yield collected


@contextmanager
def use_objects(objects: CustomObjects) -> Iterator[None]:
    """Gives these functions and classes to configurations that are read inside this context."""

    def load(code: Any, *rest: Any, **more: Any) -> Any:  # in place of Keras's loading of a lambda's code
        return objects[code if isinstance(code, str) else code[0]]

    # Keras's safe mode refuses lambdas, because a file could contain any code. These objects come from the script.
    replaced = _replace_attribute(python_utils, "func_load", load)
    with keras.saving.custom_object_scope(objects), SafeModeScope(False), replaced:
        yield


@contextmanager
def _replace_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a module inside this context; restores it afterwards."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class _CustomNames(dict[Any, str]):
    """Keras's table of registered objects' names, which also has each class and function defined outside of Keras."""

    def __init__(self, objects: CustomObjects) -> None:
        super().__init__(object_registration.GLOBAL_CUSTOM_NAMES)
        self._objects = objects

    def __contains__(self, each: object) -> bool:
        return is_custom(each) or super().__contains__(each)

    def __getitem__(self, each: Any) -> str:
        return self._objects.add(each) if is_custom(each) else super().__getitem__(each)


def is_custom(each: Any) -> bool:
    """Returns whether a class or a function is defined outside of Keras."""
    return str(getattr(each, "__module__", None)).partition(".")[0] not in ("keras", "builtins")
