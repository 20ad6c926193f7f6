"""Display: what `fit` shows of a run, by how much was asked for and in whose words."""

from lockstep.callbacks.base import Callback
from lockstep.errors import CallbackError

AUTO = "auto"


def level(verbose: int | str) -> int:
    """How much to show: nothing, progress, or lines with a breakdown of the time after them.

    >>> level("auto"), level(2)
    (1, 2)
    """
    if isinstance(verbose, str) and verbose == AUTO:
        return 1
    if not isinstance(verbose, int) or verbose not in (0, 1, 2):
        raise CallbackError(f"verbose is 0, 1, 2 or 'auto'. Got verbose={verbose!r}. Use verbose=1.")
    return int(verbose)


def shown(level: int, words: str) -> list[Callback]:
    """The callbacks that show a run."""
    if not level:
        return []
    # They bring rich, which `import lockstep` does not wait for.
    from lockstep.callbacks.lines import KerasProgress, Lines
    from lockstep.callbacks.progress import Progress

    kinds = {("lockstep", 1): Progress, ("keras", 1): KerasProgress}
    return [kinds.get((words, level), Lines)()]
