"""Reading: the data that a trainer was given, as a source of whole batches."""

from typing import TYPE_CHECKING, Any

from lockstep.core import batches
from lockstep.data import source
from lockstep.data.source import Source
from lockstep.devices import is_cpu
from lockstep.errors import BatchError

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

DEFAULT_BATCH_SIZE = 32


def open_source(trainer: "Trainer", data: Any, batch_size: int | None, shuffle: bool, default: int) -> Source:
    """Return the source of `data`, in batches of `batch_size`, or of `default` if that is None.

    Data that comes in batches keeps its own. Another `batch_size` beside it is refused: either of the two may be meant.
    """
    size = default if batch_size is None else batch_size
    found = _open(trainer, data, size, shuffle)
    if batch_size is not None and found.batch_size != batch_size:
        own = "batches already" if found.batch_size is None else f"batches of {found.batch_size} already"
        raise BatchError(
            f"Data that comes in batches has their size. Got batch_size={batch_size} beside a {type(data).__name__} "
            f"that gives {own}. Leave batch_size out to train on those, or make the {type(data).__name__} with "
            f"batches of {batch_size}."
        )
    return found


def _open(trainer: "Trainer", data: Any, size: int, shuffle: bool) -> Source:
    backend, seed = trainer._backend, trainer._run.seed
    own: Source | None = backend.source(data, size, shuffle, seed)
    if own is not None:
        return own
    if isinstance(data, dict | tuple):
        data = batches.several(data, trainer._recipe.habits.lists)
    if is_cpu(trainer._devices[0]):  # numpy gathers without waking the framework's threads
        data = batches.transform(data, backend.host)
    return source.of(data, size, shuffle, seed)
