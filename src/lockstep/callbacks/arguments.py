"""Arguments: what a callback may be told, checked where it is told."""

from lockstep.errors import CallbackError


def whole(name: str, value: int, least: int) -> int:
    """The number, or an error that says what it may be.

    >>> whole("patience", 3, least=0)
    3
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CallbackError(f"{name} is a whole number, {least} or more. Got {value!r}. Use {name}={least}.")
    return value


def steps(every: int | str) -> int | None:
    """The number of steps after which a callback is due; None where it is every epoch.

    >>> steps(100), steps("epoch")
    (100, None)
    """
    if isinstance(every, str) and every == "epoch":
        return None
    if isinstance(every, str):
        raise CallbackError(f"every is 'epoch' or a number of steps. Got {every!r}. Use every=100.")
    return whole("every", every, least=1)
