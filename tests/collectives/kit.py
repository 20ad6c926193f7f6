"""What the collectives' suite asks of a framework: a module in `kits/` with `KITS`, by name."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kit:
    """How the suite handles one kind of array."""

    array: Callable[[Any], Any]
    """numpy's array as the framework's, on its first CPU."""
    params: Callable[[Any], Any]
    """The same as something that is trained."""
    value: Callable[[Any], Any]
    """Back to numpy."""
    slope: Callable[[Any], Any] | None
    """The gradient of sum(param * param) as the framework computes it; None where nothing differentiates."""
    place: Callable[[Any], str]
    """Where an array lies."""
    devices: Callable[[], list[str]]
    """Where arrays lie that were put on devices=2."""
    in_place: bool
    """Whether an array can be written to."""
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What is in force while a test runs."""
