"""Chooses what `fit`, `evaluate` and `predict` print for each value of `verbose`."""

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.errors import CallbackError

AUTO = "auto"


def parse_verbose(verbose: int | str, auto: int = 1) -> int:
    """Returns the argument `verbose` as an integer; `auto` replaces "auto". Raises CallbackError for other values.

    0 prints nothing, 1 shows progress, and 2 prints lines and then a table of the time that each part of a step takes.

    >>> parse_verbose("auto"), parse_verbose(2)
    (1, 2)
    """
    if isinstance(verbose, str) and verbose == AUTO:
        return auto
    if not isinstance(verbose, int) or verbose not in (0, 1, 2):
        raise CallbackError(f"verbose must be 0, 1, 2 or 'auto'. Got verbose={verbose!r}. Use verbose=1.")
    return int(verbose)


def create_displays(verbose: int, words: str) -> list[Callback]:
    """Returns the callbacks that print the progress of a run in the format `words`, which is 'lockstep' or 'keras'."""
    if not verbose:
        return []
    # Imported here, because these import rich, and `import lockstep` should not wait for rich.
    from lockstep.display.keras_progress import KerasLines, KerasProgress
    from lockstep.display.progress import Progress

    kinds = {("lockstep", 1): Progress, ("keras", 1): KerasProgress}
    return [kinds.get((words, verbose), KerasLines)()]


class PassLine:
    """The line that `evaluate` and `predict` print after all batches; by default only for a Keras model.

    >>> line = PassLine(1, "keras", clock=iter([0.0, 1.5]).__next__)
    >>> batches = list(line.count(lambda: iter([1, 2, 3])))
    >>> line.print_values({"loss": 0.4123})
    3/3 - 2s - 500ms/step - loss: 0.4123
    """

    def __init__(self, verbose: int | str, words: str, clock: Callable[[], float] = perf_counter) -> None:
        self._shown = parse_verbose(verbose, auto=int(words == "keras"))
        self._words = words
        self._clock = clock
        self._began = clock()
        self._num_steps = 0

    def count(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yields the batches that `begin` returns, and counts them."""
        for batch in begin():
            self._num_steps += 1
            yield batch

    def print_values(self, values: Mapping[str, float]) -> None:
        """Prints the line with the values, the number of batches and the time, unless `verbose` is 0."""
        if not self._shown:
            return
        from lockstep.display.keras_progress import format_keras_line
        from lockstep.display.number_format import format_duration, format_significant

        seconds = self._clock() - self._began
        if self._words == "keras":
            line = format_keras_line(self._num_steps, None, seconds, values)
        else:
            facts = [f"{name} {format_significant(value)}" for name, value in values.items()]
            steps = f"{self._num_steps} batch{'es' * (self._num_steps != 1)}"
            line = "  ".join([*facts, steps, f"{format_duration(seconds)} s"])
        print(line, flush=True)
