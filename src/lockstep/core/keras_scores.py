"""The list of loss and metrics that `evaluate` returns for a Keras model."""

from collections.abc import Mapping
from typing import Any


class Scores(list[float]):
    """A list of the loss and the metrics, as Keras returns it, whose values can also be read by name.

    >>> scores = Scores({"loss": 0.5, "accuracy": 0.75})
    >>> loss, accuracy = scores
    >>> scores, scores[0] == loss == scores["loss"], dict(scores)
    ([0.5, 0.75], True, {'loss': 0.5, 'accuracy': 0.75})
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__(values.values())
        self.names = tuple(values)

    def keys(self) -> tuple[str, ...]:
        """Returns the names of the loss and the metrics, in the order of the values."""
        return self.names

    def items(self) -> tuple[tuple[str, float], ...]:
        """Returns a (name, value) pair for the loss and each metric."""
        return tuple(zip(self.names, self, strict=True))

    def __getitem__(self, key: Any) -> Any:
        """Returns a value by its name or position, or a slice of the list."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            raise KeyError(f"There is no score named {key!r}. Use one of {', '.join(self.names)}.")
        return super().__getitem__(self.names.index(key))
