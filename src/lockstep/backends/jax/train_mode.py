"""Modes: where a model is told whether it trains.

People put it in one of three places: an argument of the call (`train`, `training`,
`is_training`, or `deterministic`, which means the opposite), a field of that name,
or, in nnx, the flags that `model.train()` and `model.eval()` turn.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flax import nnx

FLAGS = ("deterministic", "use_running_average")  # what `train()` and `eval()` of an nnx module turn
_NAMES = {"train": True, "training": True, "is_training": True, "deterministic": False}


def argument(call: Callable[..., Any]) -> str | None:
    """The argument of the call that tells the mode, if there is one.

    >>> argument(lambda x, *, deterministic=True: x)
    'deterministic'
    """
    return _first(accepted(call))


def field(fields: Mapping[str, Any]) -> str | None:
    """The field that tells the mode, if there is one.

    >>> field({"width": 3, "training": True})
    'training'
    """
    return _first({name for name, value in fields.items() if tells(name, value)})


def fields(module: Any) -> list[str]:
    """The fields of one module, or of its class, that tell the mode; a method of such a name does not.

    >>> fields(type("Net", (), {"training": True, "train": lambda self: None})())
    ['training']
    """
    return [name for name in _NAMES if tells(name, inspect.getattr_static(module, name, ""))]


def tells(name: str, value: Any) -> bool:
    """Whether an attribute of this name and value tells the mode.

    >>> tells("training", True), tells("training", "slowly"), tells("scale", True)
    (True, False, False)
    """
    return (name in _NAMES or name in FLAGS) and (value is None or isinstance(value, bool))


def value(name: str, training: bool) -> bool:
    """What the argument or field of this name is set to.

    >>> value("train", True), value("deterministic", True)
    (True, False)
    """
    return training == _NAMES[name]


def accepted(call: Callable[..., Any]) -> set[str]:
    """The names of the arguments that a call takes by name."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return set()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in parameters.items() if parameter.kind in kinds}


def takes_any(call: Callable[..., Any]) -> bool:
    """Whether a call takes arguments that it does not name.

    >>> takes_any(lambda x, **more: x)
    True
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _first(names: Collection[str]) -> str | None:
    return next((name for name in _NAMES if name in names), None)


Modes = dict[str, dict[str, bool | None]]


class ModuleModes:
    """The flags in an nnx module's graph that tell its mode; the script's, which a step reads and `fit` sets."""

    def __init__(self, module: nnx.Module) -> None:
        self._module = module
        self._nodes = {str(path): node for path, node in nnx.iter_modules(module)}
        self._names = {path: _flags(node) for path, node in self._nodes.items()}
        self._entered = False

    def read(self) -> Modes:
        """The flags by their module's path and their name; None if nobody has set one."""
        return {path: {name: getattr(self._nodes[path], name) for name in self._names[path]} for path in self._told()}

    def write(self, modes: Modes) -> None:
        """Takes over the flags of another process."""
        for path, flags in modes.items():
            for name, flag in flags.items():
                if path in self._nodes and getattr(self._nodes[path], name, flag) is not flag:
                    setattr(self._nodes[path], name, flag)

    def restore(self, saved: Modes) -> None:
        """Takes over a checkpoint's, unless the model was put into evaluation mode and the saved one trains as usual.

        So a model that is loaded to be used stays in evaluation mode.
        """
        if not (_kinds(self.read()) == {False} and _kinds(saved) == {True}):
            self.write(saved)

    def enter_training(self) -> None:
        """Calls `train()` if all flags tell of evaluation, and the first time unless they differ from one another."""
        kinds = _kinds(self.read())
        if kinds == {False} or (not self._entered and kinds != {True, False}):
            turn(self._module, training=True)
        self._entered = True

    def _told(self) -> list[str]:
        return [path for path, names in self._names.items() if names]


def turn(module: nnx.Module, training: bool) -> None:
    """Puts every module of the graph into one mode, by its own `train` or `eval` and by its fields."""
    name = "train" if training else "eval"
    method = getattr(type(module), name)  # of the class: a field may have the method's name
    (method if callable(method) else getattr(nnx.Module, name))(module)
    for _, node in nnx.iter_modules(module):
        for name in fields(node):
            setattr(node, name, value(name, training))


def train_unset(module: nnx.Module) -> None:
    """Puts those flags into training mode that nobody has set."""
    for _, node in nnx.iter_modules(module):
        for name in _flags(node):
            if getattr(node, name) is None:
                setattr(node, name, _TRAINING[name])


_TRAINING = {**_NAMES, "use_running_average": False}


def _flags(node: Any) -> list[str]:
    return [name for name in _TRAINING if tells(name, inspect.getattr_static(node, name, ""))]


def _kinds(modes: Modes) -> set[bool]:
    """{True} if every flag that is set tells of training, {False} if every one tells of evaluation."""
    return {flag == _TRAINING[name] for flags in modes.values() for name, flag in flags.items() if flag is not None}
