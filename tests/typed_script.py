"""What a type checker finds in a script that uses Lockstep; `make check` reads this function, nothing runs it.

An ignored error that mypy does not find is an error of its own.
"""

from typing import assert_type

import numpy as np

import lockstep
from lockstep.backends.numpy import SGD, Dense


def script() -> None:
    data = (np.eye(8), np.arange(8) % 2)
    trainer = lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy", metrics="accuracy")
    assert_type(trainer, lockstep.Trainer[Dense])
    assert_type(trainer.model, Dense)
    assert_type(trainer.fit(data, epochs=3, batch_size=4, callbacks=None)["loss"], list[float])
    trainer.evaluate(data)["loss"] + 1.0

    trainer.fit(data, epoch=3)  # type: ignore[call-arg]
    trainer.fit(data, batchsize=4)  # type: ignore[call-arg]
    trainer.fit(data, epochs="3")  # type: ignore[arg-type]
    lockstep.wrap(Dense([8, 2], seed=1), shard=4)  # type: ignore[call-arg]

    with lockstep.wrap(Dense([8, 2], seed=1)) as other:
        assert_type(other, lockstep.Trainer[Dense])
