"""A scheduler's signal at a step of our choosing, for the tests of resuming."""

import signal

import lockstep


class TermAt(lockstep.Callback):
    """Sends this process SIGTERM after a step, as a scheduler would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.trainer.num_steps == self.step:
            signal.raise_signal(signal.SIGTERM)
