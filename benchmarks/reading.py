"""Measures the input pipeline against torch's and TensorFlow's: `python benchmarks/reading.py`.

Shuffled batches of 256 out of 60,000 images of 28×28 bytes in memory, on one core;
then what a LeNet step on two replicas waits for its input.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import load
import numpy as np
import page
import torch
from models import CASES, NUM_CLASSES, trained
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import lockstep

NUM_EXAMPLES, BATCH_SIZE = 60_000, 256
EXAMPLES_TARGET = 1_000_000
WAIT_TARGET = 1.0

Epochs = Callable[[int], Iterator[Any]]


def pipeline(x: Any, y: Any) -> Epochs:
    """Lockstep's own, read as a step reads it: batch by batch."""
    arrays = lockstep.data.arrays(x, y)
    return lambda epoch: iter(arrays.shuffle(epoch).batch(BATCH_SIZE))


def loader(x: Any, y: Any) -> Epochs:
    """torch's DataLoader as most people write it: example by example."""
    read = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=BATCH_SIZE, shuffle=True)
    return lambda epoch: iter(read)


def batched_loader(x: Any, y: Any) -> Epochs:
    """torch's DataLoader with a sampler of whole batches, which a TensorDataset gathers in one call."""
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    sampler = BatchSampler(RandomSampler(data), BATCH_SIZE, drop_last=False)
    read = DataLoader(data, sampler=sampler, batch_size=None)
    return lambda epoch: iter(read)


def tf_data(x: Any, y: Any) -> Epochs:
    """tf.data, shuffled over the whole set as Lockstep's is."""
    import tensorflow as tf

    read = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(NUM_EXAMPLES).batch(BATCH_SIZE).prefetch(2)
    return lambda epoch: iter(read)


def speeds(rounds: int) -> dict[str, list[float]]:
    """Examples a second on one core, round by round."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (NUM_EXAMPLES, 28, 28), dtype=np.uint8)
    y = generator.integers(0, 10, NUM_EXAMPLES)
    sides = {
        "Lockstep": pipeline,
        "DataLoader, batch sampler": batched_loader,
        "DataLoader": loader,
        "tf.data": tf_data,
    }
    epochs = {name: make(x, y) for name, make in sides.items()}
    found: dict[str, list[float]] = {name: [] for name in epochs}
    for index in range(rounds + 1):
        for name in list(epochs)[:: -1 if index % 2 else 1]:
            started = time.perf_counter()
            count = sum(len(batch[1]) for batch in epochs[name](index))
            seconds = time.perf_counter() - started
            assert count == NUM_EXAMPLES
            if index:  # the first is to warm up
                found[name].append(count / seconds)
    return found


class FirstEpoch(lockstep.Callback):
    """Keeps the breakdown of the first epoch, in which reader processes start."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.breakdown = self.trainer.breakdown


def waiting(name: str, steps: int) -> tuple[float, str]:
    """The percentage of a LeNet step, two replicas, that waits for input in the second epoch; and the whole story."""
    case = CASES["lenet"]
    x = np.random.default_rng(0).integers(0, 256, (steps * case.batch_size, 1, 28, 28), dtype=np.uint8)
    y = np.random.default_rng(1).integers(0, NUM_CLASSES, len(x))
    pipelines = {
        "float32 from memory": lockstep.data.arrays(*scaled(x, y)).shuffle(0).batch(case.batch_size).prefetch(2),
        "bytes, scaled by `.map`": lockstep.data.arrays(x, y).shuffle(0).batch(case.batch_size).map(scaled).prefetch(2),
    }
    model, optimizer, loss = trained(case)
    first = FirstEpoch()
    with lockstep.wrap(model, optimizer, loss, devices=["cpu", "cpu"], threads=1) as trainer:
        assert len(trainer.devices) == 2
        trainer.fit(pipelines[name], epochs=2, callbacks=[first], verbose=2)
        both = trainer.breakdown
    assert both is not None
    seconds = both.seconds - first.breakdown.seconds
    parts = ("input", "compute", "exchange", "update")
    shares = [
        [100 * (both.parts[replica][part] - first.breakdown.parts[replica][part]) / seconds for part in parts]
        for replica in range(2)
    ]
    rows = [[device, *(f"{share:.2f}" for share in own)] for device, own in zip(both.devices, shares, strict=True)]
    once = max(first.breakdown.parts[replica]["input"] for replica in range(2))
    text = page.table([f"{name}, % of the step", *parts], rows)
    return max(own[0] for own in shares), f"{text}\n\nThe first epoch waited {once:.2f} s for input in all."


def scaled(images: Any, labels: Any) -> Any:
    return images.astype(np.float32) / 255, labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the input pipeline against torch's and TensorFlow's.")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved epochs, at least 10 for a page")
    parser.add_argument("--steps", type=int, default=60, help="LeNet steps of an epoch on two replicas")
    asked = parser.parse_args()
    before = load.wait_until_quiet()
    print(f"{before}\n")
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores[:1])  # threads that are made from here on too
    found = speeds(asked.rounds)
    os.sched_setaffinity(0, cores[:2])
    own = found["Lockstep"]
    ratios = {name: [mine / theirs for mine, theirs in zip(own, values, strict=True)] for name, values in found.items()}
    rows = [
        [name, f"{page.median(values):,.0f}", page.spread(values), f"{page.median(ratios[name]):.1f}"]
        for name, values in found.items()
    ]
    reached = page.median(own)
    sections = [
        "\n\n".join(
            [
                "## Shuffled batches of 256 out of 60,000 images of 28×28 bytes, one core",
                page.table(["from memory", "examples/s", "quartiles", "Lockstep is … times as fast"], rows),
                f"Lockstep: {reached:,.0f} examples/s, of {EXAMPLES_TARGET:,} asked for: "
                f"{page.verdict(reached, EXAMPLES_TARGET)}. Examples/s, round by round:",
                f"```\n{page.raw(found, 0)}\n```",
            ]
        )
    ]
    found_shares, texts = zip(
        *(waiting(name, asked.steps) for name in ("float32 from memory", "bytes, scaled by `.map`")), strict=True
    )
    share = max(found_shares)
    sections.append(
        "\n\n".join(
            [
                f"## What a LeNet step waits for its input, 2 replicas, batch 256, the second {asked.steps} steps",
                *texts,
                f"Shuffled, `.prefetch(2)`: at most {share:.2f} % of a step waits for input, under {WAIT_TARGET} % "
                f"asked for: {page.verdict(share, WAIT_TARGET, above=False)}.",
            ]
        )
    )
    for section in sections:
        print(section, end="\n\n")
    if not before.is_quiet:
        print("No page is written, because this machine is busy.")
    elif asked.rounds >= 10:
        command = " ".join(["python benchmarks/reading.py", *sys.argv[1:]])
        notes = [
            "In a round each side reads one epoch, in turn; the order is turned around from round to round.",
            "tf.data shuffles with a buffer of all examples. Its threads, and torch's, have the one core too.",
            "The shares are those of `fit(verbose=2)`, the second of two epochs: reader processes, which a `.map` with "
            "`.prefetch` has, start in the first.",
        ]
        print(f"Wrote {page.write('input', 'Reading input on two CPU cores', command, sections, notes)}")


if __name__ == "__main__":
    main()
