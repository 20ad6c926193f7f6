"""A Keras model on one number of devices after another, with everything that must be equal written to a file.

Keras chooses its backend when it is imported, so each backend gets a process of its own.
"""

import json
import sys
from contextlib import closing
from functools import partial

import keras
import numpy as np
from keras import layers

import lockstep
from forked_workers import KERAS_WORKER, Template
from parity.runs import Case, run

SHARDS = 4

# The first weights come from numpy, below: JAX compiles each shape of a draw for itself.
Dense, Conv2D = (partial(layer, kernel_initializer="zeros") for layer in (layers.Dense, layers.Conv2D))


def mlp():
    return keras.Sequential(
        [
            keras.Input((97,)),
            Dense(33, activation="relu", kernel_regularizer="l2"),
            Dense(17, activation="tanh"),
            Dense(10),
        ]
    )


def lenet():
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            *(Conv2D(6, 5, padding="same", activation="relu"), layers.AveragePooling2D(2)),
            *(layers.Dropout(0.3), Conv2D(16, 5, activation="relu"), layers.Flatten()),
            *(Dense(32, activation="relu"), layers.Dropout(0.5), Dense(10)),
        ]
    )


def normalized(x, channels, size, stride=1):
    return layers.BatchNormalization()(Conv2D(channels, size, stride, "same", use_bias=False)(x))


def resnet():
    start = keras.Input((16, 16, 1))
    x = layers.ReLU()(normalized(start, 8, 3))
    for channels, stride in ((8, 1), (16, 2)):
        short = x if stride == 1 else normalized(x, channels, 1, stride)
        x = normalized(layers.ReLU()(normalized(x, channels, 3, stride)), channels, 3)
        x = layers.ReLU()(layers.Add()([short, x]))
    return keras.Model(start, Dense(10)(layers.GlobalAveragePooling2D()(x)))


def trainer(make, devices):
    keras.utils.set_random_seed(7)
    model = make()
    generator = np.random.Generator(np.random.PCG64(7))
    for kernel in (variable for variable in model.trainable_variables if len(variable.shape) > 1):
        kernel.assign(generator.standard_normal(kernel.shape) / np.sqrt(np.prod(kernel.shape[:-1])))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3, global_clipnorm=1.0), loss, metrics=["accuracy"])
    return lockstep.wrap(model, devices=devices, shards=SHARDS)


def cases(make):
    """Each shape of a shard is compiled for its own: the small model has many, the large ones one."""
    generator = np.random.Generator(np.random.PCG64(3))

    def batch(size, shape=(16, 16, 1)):
        return generator.standard_normal((size, *shape)).astype("float32"), generator.integers(0, 10, size)

    if make is not mlp:
        return [Case(make.__name__, SHARDS, [batch(12), batch(12)])]
    *steps, data = (batch(size, (97,)) for size in (27, 3, 13, 9))
    weighted = (*steps.pop(), generator.uniform(0.1, 2.0, 13).astype("float32"))
    return [
        Case("mlp", SHARDS, [*steps, weighted]),
        Case("mlp, evaluate, predict", SHARDS, forward=[(data, data[0])]),
    ]


def main(path, *plan):
    """Each word of the plan is a model and its numbers of devices, as in `mlp:1,2`."""
    found = {}
    for name, _, counts in (word.partition(":") for word in plan):
        make = {"mlp": mlp, "lenet": lenet, "resnet": resnet}[name]
        for devices in map(int, counts.split(",")):
            with trainer(make, devices) as each:
                assert len(each.devices) == devices
                records = [run(each, case) for case in cases(make)]
            found[f"{name} {devices}"] = [(record.steps, record.seconds) for record in records]
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    if keras.config.backend() == "torch":
        with closing(Template(KERAS_WORKER)) as template, template.in_use():
            main(*sys.argv[1:])
    else:
        main(*sys.argv[1:])
