"""Checks whether the hyperparameters in a checkpoint fit an optimizer, by name and by type.

A checkpoint's checksum protects against damage, but not against a file with wrong values. A string in place of a
learning rate would raise only in the next step, after the state has been replaced. So all hyperparameters are checked
before the first is set.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from lockstep.core.arguments import is_number, show
from lockstep.errors import OptimizerError, StateError

PARAMETERS = "params"  # the key of a group's parameters, beside its hyperparameters


def check_groups(saved: Sequence[Any], own: Sequence[Mapping[str, Any]], may_add: bool) -> None:
    """Raises `StateError` if a saved group has a name or a value that does not fit the optimizer's group.

    With `may_add=True` a saved group may have additional names, because PyTorch's schedulers add hyperparameters.

    >>> check_groups([{"lr": 0.1, "betas": (0.9, 0.99)}], [{"lr": 1, "betas": (0.8, 0.9)}], may_add=False)
    >>> check_groups([{"lr": "0.1"}], [{"lr": 1.0}], may_add=False)
    Traceback (most recent call last):
    lockstep.errors.StateError: The checkpoint does not fit this optimizer. Group 0 has lr='0.1' in the checkpoint and \
lr=1.0 in the optimizer. Use another checkpoint, or the optimizer with which the checkpoint was saved.
    """
    for index, (group, there) in enumerate(zip(saved, own, strict=True)):
        if not isinstance(group, Mapping) or not all(isinstance(name, str) for name in group):
            raise StateError(
                f"The checkpoint does not fit this optimizer. Group {index} is {group!r:.100} in the checkpoint, not a "
                "dict of hyperparameters by name. Use another checkpoint."
            )
        for name, value in group.items():
            if name == PARAMETERS or (name not in there and not (may_add and _is_scalar(value))):
                raise StateError(
                    f"The checkpoint does not fit this optimizer. Group {index} has the hyperparameter {name!r:.100} "
                    "in the checkpoint, and the optimizer has no such hyperparameter. Use another checkpoint, or the "
                    "optimizer with which the checkpoint was saved."
                )
            if name in there and not _fits(name, value, there[name]):
                raise StateError(
                    f"The checkpoint does not fit this optimizer. Group {index} has {name}={value!r:.100} in the "
                    f"checkpoint and {name}={there[name]!r:.100} in the optimizer. Use another checkpoint, or the "
                    "optimizer with which the checkpoint was saved."
                )


def assign_rates(groups: Sequence[Mapping[str, Any]], rates: Any) -> list[dict[str, float]]:
    """Returns the new learning rate of each group that has a rate; raises unless `rates` has a finite number for each.

    >>> assign_rates([{"lr": 0.1}, {"momentum": 0.9}], (0.5,))
    [{'lr': 0.5}, {}]
    """
    count = sum("lr" in group for group in groups)
    if not isinstance(rates, Sequence) or not all(is_number(rate) and math.isfinite(rate) for rate in rates):
        raise OptimizerError(
            f"learning_rates={show(rates)} is not a tuple of finite numbers, one for each group of parameters. "
            f"Use trainer.learning_rates = {(0.1,) * count}."
        )
    if len(rates) != count:
        raise OptimizerError(
            f"learning_rates has {len(rates)} rates for {count} groups of parameters. Give one rate for each group."
        )
    left = iter(rates)
    return [{"lr": float(next(left))} if "lr" in group else {} for group in groups]


def is_same_kind(value: Any, own: Any) -> bool:
    """Returns whether a saved plain value has the same kind as the optimizer's own value and so can replace it.

    All numbers are of one kind. None and a scalar can replace each other.

    >>> is_same_kind(1, 0.5), is_same_kind(None, True), is_same_kind("x", 0.5), is_same_kind((1, "x"), (1, 2))
    (True, True, False, False)
    """
    if value is None or own is None:
        return _is_scalar(own if value is None else value)
    if isinstance(own, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(own) and all(map(is_same_kind, value, own))
    if is_number(own):
        return is_number(value)
    return isinstance(value, type(own))


def _fits(name: str, value: Any, own: Any) -> bool:
    if name == "lr":
        return is_number(value) and math.isfinite(value)
    return is_same_kind(value, own) and not (value is None and is_number(own))  # the optimizer computes with a number


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, Number | str)
