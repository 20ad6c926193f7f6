"""Finds how a model gets its mode, training or evaluation, and sets it.

There are three ways: an argument of the call (`train`, `training`, `is_training`, or `deterministic`, which means the
opposite), a field of that name, or, in nnx, the flags that `model.train()` and `model.eval()` set.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flax import nnx

from lockstep.errors import ModelError

FLAGS = ("deterministic", "use_running_average")  # the attributes that `train()` and `eval()` of an nnx module set
_NAMES = {"train": True, "training": True, "is_training": True, "deterministic": False}  # with their training value
_TRAINING = {**_NAMES, "use_running_average": False}

Modes = dict[str, dict[str, bool | None]]  # flags by their module's path and their name


def find_argument(call: Callable[..., Any]) -> str | None:
    """Returns the name of the callable's argument that sets the mode; None if it has no such argument.

    >>> find_argument(lambda x, *, deterministic=True: x)
    'deterministic'
    """
    return _select_first(list_accepted(call))


def find_field(fields: Mapping[str, Any]) -> str | None:
    """Returns the name of the field that sets the mode; None if there is no such field.

    >>> find_field({"width": 3, "training": True})
    'training'
    """
    return _select_first({name for name, value in fields.items() if is_mode_flag(name, value)})


def list_fields(module: Any) -> list[str]:
    """Returns the names of the fields of a module or its class that set the mode, but not methods such as `train()`.

    >>> list_fields(type("Net", (), {"training": True, "train": lambda self: None})())
    ['training']
    """
    return [name for name in _NAMES if is_mode_flag(name, inspect.getattr_static(module, name, ""))]


def is_mode_flag(name: str, value: Any) -> bool:
    """Returns whether an attribute of this name and value is a mode flag.

    >>> is_mode_flag("training", True), is_mode_flag("training", "slowly"), is_mode_flag("scale", True)
    (True, False, False)
    """
    return (name in _NAMES or name in FLAGS) and (value is None or isinstance(value, bool))


def choose_value(name: str, training: bool) -> bool:
    """Returns the value that the argument or field of this name must have for training, or for evaluation.

    >>> choose_value("train", True), choose_value("deterministic", True)
    (True, False)
    """
    return training == _NAMES[name]


def list_accepted(call: Callable[..., Any]) -> set[str]:
    """Returns the names of a callable's arguments that can be given as keywords."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return set()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in parameters.items() if parameter.kind in kinds}


def check_apply(apply: Callable[..., Any]) -> None:
    """Raises ModelError if the arguments of `apply(variables, *inputs)` do not show how to call it."""
    try:
        parameters = list(inspect.signature(apply).parameters.values())
    except (TypeError, ValueError):
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        raise ModelError(
            "The model's apply function takes **kwargs, so Lockstep cannot see whether it needs the mode, rngs or "
            "mutable. Name the arguments that it needs, e.g. apply(variables, x, *, train, rngs, mutable). If it needs "
            "none of them, use lambda variables, x: apply(variables, x)."
        )
    if [parameter.name for parameter in parameters[1:2]] == ["rng"]:  # e.g. of haiku
        raise ModelError(
            "The model's apply function takes a random key rng before the inputs, but Lockstep calls it with the "
            "variables and the inputs, and gives keys by name. Use lambda variables, x, *, rngs: apply(variables, "
            "rngs['dropout'], x). With haiku, hk.without_apply_rng removes rng from a model that draws nothing."
        )


def _select_first(names: Collection[str]) -> str | None:
    """Returns the first of `_NAMES` that is among the names; None if there is none."""
    return next((name for name in _NAMES if name in names), None)


class ModuleModes:
    """The mode flags in an nnx module's graph, which a step reads and `fit` sets."""

    def __init__(self, module: nnx.Module) -> None:
        self._module = module
        self._nodes = {str(path): node for path, node in nnx.iter_modules(module)}
        self._names = {path: _list_flags(node) for path, node in self._nodes.items()}
        self._was_entered = False  # whether `enter_training` was called

    def read(self) -> Modes:
        """Returns the flags by their module's path and their name; None for a flag that was never set."""
        return {
            path: {name: getattr(self._nodes[path], name) for name in names}
            for path, names in self._names.items()
            if names
        }

    def write(self, modes: Modes) -> None:
        """Writes flags that were read in another process or from a checkpoint."""
        for path, flags in modes.items():
            for name, flag in flags.items():
                if path in self._nodes and getattr(self._nodes[path], name, flag) is not flag:
                    setattr(self._nodes[path], name, flag)

    def restore(self, saved: Modes) -> None:
        """Writes a checkpoint's flags, unless all present flags say evaluation and all saved flags say training.

        So a model that is loaded for inference stays in evaluation mode.
        """
        if not (_find_kinds(self.read()) == {False} and _find_kinds(saved) == {True}):
            self.write(saved)

    def enter_training(self) -> None:
        """Puts the module into training mode unless the script has chosen modes itself.

        If all flags say evaluation, its `train()` is called. If the flags differ, the script has chosen them, e.g. to
        freeze a batch norm. Otherwise `train()` is called the first time, because it may do more than set flags.
        """
        kinds = _find_kinds(self.read())
        if kinds == {False} or (not self._was_entered and kinds != {True, False}):
            set_mode(self._module, training=True)
        self._was_entered = True


def set_mode(module: nnx.Module, training: bool) -> None:
    """Puts every module of the graph into training or evaluation mode: calls `train` or `eval`, and sets fields."""
    name = "train" if training else "eval"
    # A field may have the method's name: of the instance, or of the class, which then has no such method.
    method = getattr(type(module), name)
    (method if callable(method) else getattr(nnx.Module, name))(module)
    for _, node in nnx.iter_modules(module):
        for name in list_fields(node):
            setattr(node, name, choose_value(name, training))


def set_unset_flags(module: nnx.Module) -> None:
    """Sets the flags that are None to training mode."""
    for _, node in nnx.iter_modules(module):
        for name in _list_flags(node):
            if getattr(node, name) is None:
                setattr(node, name, _TRAINING[name])


def _list_flags(node: Any) -> list[str]:
    """Returns the names of a module's mode flags."""
    return [name for name in _TRAINING if is_mode_flag(name, inspect.getattr_static(node, name, ""))]


def _find_kinds(modes: Modes) -> set[bool]:
    """Returns {True} if all set flags say training, {False} if all say evaluation, else both or the empty set."""
    return {flag == _TRAINING[name] for flags in modes.values() for name, flag in flags.items() if flag is not None}
