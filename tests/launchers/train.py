"""The script that every launcher starts. `python train.py` alone prints the digest that all of them must print.

With `--checkpoint` the run saves as it goes, and goes on from there. With `--die FILE` the first process kills itself
at the start of the third epoch, once: the file says that it has. `--pause` makes a step take that many seconds.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import numpy as np

import lockstep
from lockstep.backends.numpy import SGD, Dense


class Pacing(lockstep.Callback):
    """Prints each epoch with the size of the world, slows steps down, and ends the process where it is asked to."""

    def __init__(self, pause: float, die: str | None) -> None:
        self.pause, self.die = pause, die

    def on_epoch_begin(self, epoch, logs=None):
        print(f"epoch {epoch} on {len(self.trainer.devices)}", flush=True)
        if self.die and epoch == 2 and not Path(self.die).exists():
            Path(self.die).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.pause)


def train(epochs=4, checkpoint=None, pause=0.0, die=None):
    generator = np.random.default_rng(1)
    x, y = generator.standard_normal((150, 11)).astype("float32"), generator.integers(0, 4, 150)
    model, optimizer = Dense([11, 9, 4], seed=1, dtype="float32", dropout=0.3), SGD(0.1, momentum=0.9)
    trainer = lockstep.wrap(model, optimizer, "cross_entropy", metrics=["accuracy"], shards=8)
    callbacks = [Pacing(pause, die)]
    trainer.fit((x, y), epochs=epochs, batch_size=61, verbose=0, checkpoint=checkpoint, callbacks=callbacks)
    print(f"result {len(trainer.devices)} {trainer.digest()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--die")
    train(**vars(parser.parse_args()))
