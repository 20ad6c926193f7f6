"""The array operations that each framework brings: all that `lockstep.collectives` asks of it.

The order of additions, the nests and the checks are written once, in
`lockstep.collectives`. A framework copies, adds and writes.
"""

from typing import Any, Protocol


class ArrayOps(Protocol):
    """What a backend's module `array_ops` offers: one framework's arrays on this process's devices."""

    def copy(self, array: Any, device: str) -> Any:
        """A contiguous copy on the device, in memory of its own, that can be trained where the original can."""

    def cut(self, array: Any, where: Any, device: str) -> Any:
        """The examples that the slice says (`...`: all there is), in contiguous memory of their own on the device."""

    def absent(self, array: Any) -> str:
        """Why this array has no value here and now; empty where it has one."""

    def check(self, array: Any) -> str:
        """Why a sum cannot take the place of this array's value; empty where it can."""

    def add(self, left: Any, right: Any) -> Any:
        """left + right where left lies, in memory of its own."""

    def write(self, value: Any, target: Any) -> Any:
        """The value in the target's place; where the framework writes to no array, a copy where the target lies."""
