"""The input pipeline, which reads, transforms, shuffles and batches examples.

train = lockstep.data.arrays(x, y).shuffle(0).map(augment, random=True).batch(256).prefetch(2)
trainer.fit(train, epochs=10)
"""

from lockstep.data.pipeline import Pipeline, arrays, indexed, stream
from lockstep.data.source import ArraySource, IterableSource, Source

__all__ = ["ArraySource", "IterableSource", "Pipeline", "Source", "arrays", "indexed", "stream"]
