"""Prints what Lockstep calls in a backend of another package, in the order of the calls: see docs/new-backend.md."""

import sys
from contextlib import contextmanager
from types import FunctionType

import lockstep_toynet
import numpy as np
import toynet
from lockstep_toynet.backend import ToynetBackend

import lockstep

CALLS = []
FOLD = {"add", "create_buffer"}  # what the fold calls, to which a backend gives its leaves


def record(name, function):
    """The function, whose calls are noted; one that is repeated is noted once."""

    def call(*arguments, **named):
        if CALLS[-1:] != [name] and (name in FOLD or not is_called_by_backend()):
            CALLS.append(name)
        return function(*arguments, **named)

    return call


def is_called_by_backend():
    """Whether the backend itself makes this call."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_globals["__name__"].startswith("lockstep_toynet"):
        frame = frame.f_back
    return frame is not None


@contextmanager
def record_computing(self, work, computing=ToynetBackend.computing):
    CALLS.append("computing {")
    with computing(self, work):
        yield
    CALLS.append("}")


def take(title):
    print(f"{title}: {' '.join(CALLS)}")
    CALLS.clear()


def train(devices):
    generator = np.random.default_rng(0)
    shapes = {"0.weight": (6, 7), "0.bias": (7,), "1.weight": (7, 8), "1.bias": (8,)}
    weights = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    batch = generator.standard_normal((32, 6)), generator.integers(0, 8, 32)
    model = toynet.Dense(weights)
    optimizer = toynet.SGD(model.parameters, 0.1)
    with lockstep.wrap(model, optimizer, toynet.CrossEntropy(), devices=devices, shards=4) as trainer:
        take("wrap")
        trainer.step(batch)
        take("step")
        logs = trainer.step(batch)
        take("step")
        logs["loss"], logs["grad_norm"]
        take("logs")
        trainer.evaluate(batch)
        take("evaluate")
        trainer.predict(batch[0])
        take("predict")
        trainer.digest()
        take("digest")
        trainer.learning_rates = (0.05,)
        take("learning_rates")
        trainer.load_state(trainer.state())
        take("state")


def watch():
    """Replaces the public functions of the backend's module and class by ones that are recorded."""
    for name in ("available", "initial_seed", "variables", "adopt", "open", "processes"):
        setattr(lockstep_toynet, name, record(f"module.{name}", getattr(lockstep_toynet, name)))
    for name, value in vars(ToynetBackend).items():
        if isinstance(value, FunctionType) and not name.startswith("_"):
            setattr(ToynetBackend, name, record(name, value))
    for name in ("criterion", "columns"):
        setattr(ToynetBackend, name, property(record(name, vars(ToynetBackend)[name].fget)))
    ToynetBackend.computing = record_computing


if __name__ == "__main__":
    watch()
    train(int(sys.argv[1]))
