"""Whether the script has written to something since the last time that was asked."""

from collections.abc import Callable
from typing import Any


class ChangeDetector:
    """Compares what `read` returns (counters, addresses, checksums) with what it returned before.

    Nothing is read before the first question, which only workers make necessary: with one replica it costs nothing.

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
        """Return whether anything has changed since the last question; False the first time."""
        last, self._last = self._last, self._read()
        return last is not None and last != self._last

    def accept(self) -> None:
        """Take what is there now as known, because Lockstep itself has written it."""
        if self._last is not None:
            self._last = self._read()
