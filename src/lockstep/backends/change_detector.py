"""Detects whether the script has written to the state."""

from collections.abc import Callable
from typing import Any


class ChangeDetector:
    """Compares what `read` returns (counters, addresses, checksums) with what it returned the last time.

    Nothing is read before the first call of `has_changed`, which is made only if there are workers.

    >>> weights = [1.0, 2.0]
    >>> detector = ChangeDetector(lambda: list(weights))
    >>> detector.has_changed()
    False
    >>> weights[0] = 3.0
    >>> detector.has_changed(), detector.has_changed()
    (True, False)
    """

    def __init__(self, read: Callable[[], list[Any]]) -> None:
        self._read = read
        self._last: list[Any] | None = None

    def has_changed(self) -> bool:
        """Returns whether anything has changed since the last call; False the first time."""
        last, self._last = self._last, self._read()
        return last is not None and last != self._last

    def accept(self) -> None:
        """Accepts the present state, which Lockstep itself has written; later calls compare with it."""
        if self._last is not None:
            self._last = self._read()
