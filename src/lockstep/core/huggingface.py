"""Recognizes an IterableDataset of Hugging Face without importing the package `datasets`."""

from typing import Any


def is_stream(data: Any) -> bool:
    """Returns whether `data` is an IterableDataset of Hugging Face.

    The full module name is compared, because many scripts have a folder `datasets` of their own.
    """
    return any(kind.__module__ == "datasets.iterable_dataset" for kind in type(data).__mro__)


def is_batched(data: Any) -> bool:
    """Returns whether an IterableDataset ends with `.batch(n)`, so that it yields batches instead of examples."""
    function = getattr(getattr(data, "_ex_iterable", None), "function", None)
    name = getattr(function, "__qualname__", "")
    return getattr(function, "__module__", "").startswith("datasets.") and "batch" in name
