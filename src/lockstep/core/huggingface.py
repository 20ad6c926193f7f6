"""What Hugging Face's IterableDataset says of itself, without importing it."""

from typing import Any


def is_stream(data: Any) -> bool:
    """Returns whether this is one of Hugging Face's objects that are read one after another.

    Many scripts have a folder `datasets` of their own, so the package's name alone says nothing.
    """
    return any(kind.__module__ == "datasets.iterable_dataset" for kind in type(data).__mro__)


def is_batched(data: Any) -> bool:
    """Returns whether the last step of the stream is `.batch(n)`, so that it gives batches instead of examples."""
    function = getattr(getattr(data, "_ex_iterable", None), "function", None)
    name = getattr(function, "__qualname__", "")
    return getattr(function, "__module__", "").startswith("datasets.") and "batch" in name
