"""The TensorFlow scripts of `demo` and `verify`: Lockstep's, and the same with MirroredStrategy for comparison."""

from lockstep.cli.scripts.base import Peer, Scripts

_TRAIN = """\
import sys

import keras
from keras import layers

import lockstep
from lockstep.datasets import digits

train, test = digits()
keras.utils.set_random_seed(0)
norm = layers.BatchNormalization(momentum=0.9)
net = keras.Sequential([layers.Dense(128), norm, layers.ReLU(), layers.Dropout(0.2), layers.Dense(10)])
net.build((None, 64))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
net.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"])
trainer = lockstep.wrap(net, devices=sys.argv[1:] or None)
history = trainer.fit(train, epochs=10, batch_size=256, validation_data=test)
history.to_csv("history.csv")
print(trainer.digest())
"""

# The same model, optimizer, batch and number of epochs, in MirroredStrategy's scope.
_MIRRORED = """\
import csv
import hashlib
import sys
import time

import keras
import tensorflow as tf
from keras import layers

from lockstep.datasets import digits

names = [f"CPU:{index}" for index in range(int(sys.argv[1]))]
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in names])
(x, y), (xt, yt) = digits()
keras.utils.set_random_seed(0)
with tf.distribute.MirroredStrategy(names).scope():
    norm = layers.BatchNormalization(momentum=0.9)
    net = keras.Sequential([layers.Dense(128), norm, layers.ReLU(), layers.Dropout(0.2), layers.Dense(10)])
    net.build((None, 64))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"])
rows = []


class Clock(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.started = time.perf_counter()

    def on_test_begin(self, logs=None):
        rows.append({"epoch": len(rows), "seconds": time.perf_counter() - self.started})


history = net.fit(x, y, epochs=10, batch_size=256, validation_data=(xt, yt), verbose=0, callbacks=[Clock()])
for row, accuracy in zip(rows, history.history["val_accuracy"], strict=True):
    row["val_accuracy"] = accuracy
with open("history.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
digest = hashlib.sha256()
for variable in net.weights:
    digest.update(keras.ops.convert_to_numpy(variable).tobytes())
print(digest.hexdigest())
"""

# What `lockstep verify` checks when it is given no script.
_VERIFY = """\
import keras
from keras import layers

import lockstep
from lockstep.datasets import digits


def make_trainer(devices, shards):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([
        keras.Input((64,)), layers.Reshape((8, 8, 1)),
        layers.Conv2D(6, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.MaxPool2D(2),
        layers.Conv2D(16, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten(),
        layers.Dense(84, activation="relu"), layers.Dropout(0.25), layers.Dense(10),
    ])
    net.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return lockstep.wrap(net, devices=devices, shards=shards), digits()[0]
"""

SCRIPTS = Scripts("train_keras.py", _TRAIN, _VERIFY, Peer("MirroredStrategy", "devices", "mirrored.py", _MIRRORED))
