"""Trains a Keras model and a plain TensorFlow function for two steps; the first process prints the results."""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import lockstep

GENERATOR = np.random.Generator(np.random.PCG64(1))
X, Y = GENERATOR.standard_normal((61, 12, 12, 1), np.float32), GENERATOR.integers(0, 10, 61)


def wrap_network():
    keras.utils.set_random_seed(3)
    stack = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Flatten()]
    stack += [keras.layers.Dropout(0.3), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((12, 12, 1)), *stack])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return lockstep.wrap(model, shards=4)


def wrap_function():
    w, b = tf.Variable(np.full((144, 10), 0.01, "float32")), tf.Variable(np.zeros(10, "float32"))
    model = (lambda x: tf.reshape(x, (x.shape[0], -1)) @ w + b, [w, b])
    return lockstep.wrap(model, keras.optimizers.SGD(0.1, 0.9), "cross_entropy", shards=4)


def train():
    """Returns the number of devices, and what the steps and an evaluation gave; None except in the first process."""
    result = []
    for wrap in (wrap_network, wrap_function):
        with wrap() as trainer:
            for size in (61, 5):
                logs = trainer.step((X[:size], Y[:size]))
                result.append([trainer.digest(), logs["loss"].hex()])
            result.append([len(trainer.devices), sorted(trainer.evaluate((X, Y)).items())])
            first = trainer.runs_callbacks
    return json.loads(json.dumps(result)) if first else None


def main(threads):
    tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    if (result := train()) is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
