"""The input pipeline: where the batches of an epoch come from."""

from lockstep.data.source import ArraySource, IterableSource, Source

__all__ = ["ArraySource", "IterableSource", "Source"]
