"""Scores: what evaluating a Keras model gives."""

from collections.abc import Mapping
from typing import Any


class Scores(list[float]):
    """Keras's list of loss and metrics, which also answers by name.

    >>> scores = Scores({"loss": 0.5, "accuracy": 0.75})
    >>> loss, accuracy = scores
    >>> scores, scores[0] == loss == scores["loss"], dict(scores)
    ([0.5, 0.75], True, {'loss': 0.5, 'accuracy': 0.75})
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__(values.values())
        self.names = tuple(values)

    def keys(self) -> tuple[str, ...]:
        """The names, in the order of the values."""
        return self.names

    def items(self) -> tuple[tuple[str, float], ...]:
        """Each name with its value."""
        return tuple(zip(self.names, self, strict=True))

    def __getitem__(self, key: Any) -> Any:
        """One value, by its name or its position; a slice of the list."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            raise KeyError(f"{key}; there are {', '.join(self.names)}")
        return super().__getitem__(self.names.index(key))
