"""What `fit`, `evaluate` and `predict` print for each `verbose=`."""

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.errors import CallbackError

AUTO = "auto"


def level(verbose: int | str, auto: int = 1) -> int:
    """How much to show: nothing, progress, or lines with a breakdown of the time after them.

    >>> level("auto"), level(2)
    (1, 2)
    """
    if isinstance(verbose, str) and verbose == AUTO:
        return auto
    if not isinstance(verbose, int) or verbose not in (0, 1, 2):
        raise CallbackError(f"verbose is 0, 1, 2 or 'auto'. Got verbose={verbose!r}. Use verbose=1.")
    return int(verbose)


def create_displays(level: int, words: str) -> list[Callback]:
    """The callbacks that show a run."""
    if not level:
        return []
    # They bring rich, which `import lockstep` does not wait for.
    from lockstep.display.keras_progress import KerasLines, KerasProgress
    from lockstep.display.progress import Progress

    kinds = {("lockstep", 1): Progress, ("keras", 1): KerasProgress}
    return [kinds.get((words, level), KerasLines)()]


class PassLine:
    """The line that `evaluate` and `predict` print: always for a Keras model, as Keras does, else if asked to.

    >>> line = PassLine(1, "keras", clock=iter([0.0, 1.5]).__next__)
    >>> batches = list(line.count(lambda: iter([1, 2, 3])))
    >>> line.print_values({"loss": 0.4123})
    3/3 - 2s - 500ms/step - loss: 0.4123
    """

    def __init__(self, verbose: int | str, words: str, clock: Callable[[], float] = perf_counter) -> None:
        self._shown = level(verbose, auto=int(words == "keras"))
        self._words = words
        self._clock = clock
        self._began = clock()
        self._num_steps = 0

    def count(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches, counted."""
        for batch in begin():
            self._num_steps += 1
            yield batch

    def print_values(self, values: Mapping[str, float]) -> None:
        """Prints the line, once the pass is over."""
        if not self._shown:
            return
        from lockstep.display.keras_progress import keras_line
        from lockstep.display.number_format import duration, significant

        seconds = self._clock() - self._began
        if self._words == "keras":
            line = keras_line(self._num_steps, None, seconds, values)
        else:
            facts = [f"{name} {significant(value)}" for name, value in values.items()]
            steps = f"{self._num_steps} batch{'es' * (self._num_steps != 1)}"
            line = "  ".join([*facts, steps, f"{duration(seconds)} s"])
        print(line, flush=True)
