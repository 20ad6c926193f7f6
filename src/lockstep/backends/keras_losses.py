"""Which losses are Keras's: they go with Keras models and with TensorFlow's functions. Nothing is imported here."""

from typing import Any


def is_of_keras(loss: Any) -> bool:
    """Whether a loss, or the function that it wraps, is one of Keras's, which give one value per example."""
    function = getattr(loss, "fn", loss)
    if hasattr(function, "call"):
        function = type(function).call
    return (getattr(function, "__module__", None) or "").startswith("keras.")
