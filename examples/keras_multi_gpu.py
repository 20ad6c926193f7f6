"""The Keras guide "Multi-GPU distributed training with TensorFlow", with Lockstep: the same bits on any number of GPUs.

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import keras
import numpy as np
import tensorflow as tf

import lockstep
from lockstep.datasets import fashion_mnist  # or mnist, the data of the guide


def get_compiled_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input(shape=(784,))
    x = keras.layers.Dense(256, activation="relu")(inputs)
    x = keras.layers.Dense(256, activation="relu")(x)
    outputs = keras.layers.Dense(10)(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def get_dataset(batch_size=64, num_val_samples=10_000):
    (x, y), (x_test, y_test) = fashion_mnist()
    x, x_test = (images.reshape(-1, 784).astype("float32") / 255 for images in (x, x_test))
    val, train = np.split(np.random.default_rng(0).permutation(len(x)), [num_val_samples])  # a random part to validate
    parts = (x[train], y[train]), (x[val], y[val]), (x_test, y_test)
    return [tf.data.Dataset.from_tensor_slices(part).batch(batch_size) for part in parts]


def run_training(epochs):
    trainer = lockstep.wrap(get_compiled_model())  # on every GPU of this machine; restarts from the newest checkpoint
    save = keras.callbacks.ModelCheckpoint("ckpt-{epoch}.keras")  # for Keras; what exactly goes on is in checkpoint=
    trainer.fit(train, epochs=epochs, validation_data=val, callbacks=[save], checkpoint="keras-ckpt")
    return trainer


train, val, test = get_dataset()
run_training(epochs=1)  # creates the model and saves it,
trainer = run_training(epochs=2)  # goes on from the newest checkpoint: one more epoch
print(trainer.evaluate(test))
print(trainer.digest())
trainer.model.save("keras-model.keras")  # a plain Keras file
