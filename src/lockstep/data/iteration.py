"""Iterating a pipeline in plain Python."""

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING, Any

from lockstep.core.batches import Rows
from lockstep.data.collate import row
from lockstep.data.inputs import Stream
from lockstep.data.reader import Reader
from lockstep.data.streaming import Streaming

if TYPE_CHECKING:
    from lockstep.data.pipeline import Pipeline


def iterate(pipeline: "Pipeline") -> Iterator[Any]:
    """The batches of epoch 0, or its examples; what was started for them ends with the iterator."""
    chain = pipeline.chain
    read = _streamed(pipeline) if isinstance(chain.base, Stream) else _read(pipeline)
    for batch in read:
        yield batch if pipeline.batched else row(batch, 0)


def _read(pipeline: "Pipeline") -> Iterator[Any]:
    chain = pipeline.chain
    with closing(Reader(chain)) as reader:
        for number in count() if chain.batches.num is None else range(chain.batches.num):
            yield reader.read([Rows(None, 0, number, chain.size(0, number))])[0]


def _streamed(pipeline: "Pipeline") -> Iterator[Any]:
    with closing(Streaming(pipeline.chain)) as streaming:
        yield from streaming.epoch(0, 0)
