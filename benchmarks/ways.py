"""What the peers of all frameworks share: their arguments, their data, and the ways to train with Lockstep."""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from peers import Way
from timing import StepClock, time_steps

import lockstep

NUM_EXAMPLES = 16_384
SECONDS_TO_CHOOSE = 12.0  # of training, in which a run with default arguments chooses its number of devices


def serve_arguments() -> argparse.Namespace:
    """Parse what a script is called with as a peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", required=True, help="what the peer is")
    parser.add_argument("model")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--shards", type=int)
    parser.add_argument("--expect", type=int, nargs=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def images(shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels; their values do not matter here, and are the same everywhere."""
    generator = np.random.Generator(np.random.PCG64(0))
    x = generator.standard_normal((NUM_EXAMPLES, *shape), np.float32)
    return x, generator.integers(0, 10, NUM_EXAMPLES).astype(np.int32)


def shuffled_batches(arrays: Sequence[np.ndarray], batch_size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Give shuffled batches without end."""
    generator = np.random.Generator(np.random.PCG64(1))
    while True:
        order = generator.permutation(NUM_EXAMPLES)
        for start in range(0, NUM_EXAMPLES - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield tuple(array[chosen] for array in arrays)


def lockstep_ways(
    trainer: Any, arrays: Any, batches: Iterator[Any], batch_size: int, expected: Sequence[int]
) -> dict[str, Way]:
    """Return `trainer.step` in a loop of one's own, and `trainer.fit`.

    `expected` are the row's devices and shards; with 0 devices Lockstep chooses how many.

    The loop reads loss and accuracy of each step once the next one has been started.
    """
    before: list[Any] = []
    sums = {"loss": 0.0, "accuracy": 0.0}
    most = NUM_EXAMPLES // batch_size  # steps in an epoch
    clock = StepClock()

    def finish() -> None:
        for logs in before:
            for name in sums:
                sums[name] += logs[name]
        before.clear()

    def step() -> None:
        logs = trainer.step(next(batches), verbose=0)
        finish()
        before.append(logs)

    class Marks(lockstep.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            clock.mark()

    def fit(warm: int, count: int) -> list[float]:
        epochs = math.ceil((max(warm, 1) + count) / most)
        steps = math.ceil((max(warm, 1) + count) / epochs)
        trainer.fit(arrays, epochs=epochs, steps_per_epoch=steps, batch_size=batch_size, callbacks=[Marks()], verbose=0)
        clock.close()
        return clock.take(count)

    step()
    finish()
    assert sums["loss"] > 0
    devices, shards = expected
    end = time.monotonic() + SECONDS_TO_CHOOSE
    while not devices and time.monotonic() < end:
        step()
    assert devices in (0, len(trainer.devices)), trainer.devices
    assert f" {shards} shard{'' if shards == 1 else 's'} of " in trainer.opening, trainer.opening
    return {"step": partial(time_steps, step, finish), "fit": fit}
