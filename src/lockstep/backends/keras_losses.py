"""Finds out whether a loss belongs to Keras, without importing Keras."""

from typing import Any


def is_of_keras(loss: Any) -> bool:
    """Returns whether a loss, or the function that it wraps, is defined by Keras and so gives one value per example."""
    function = getattr(loss, "fn", loss)
    if hasattr(function, "call"):
        function = type(function).call
    return (getattr(function, "__module__", None) or "").startswith("keras.")
