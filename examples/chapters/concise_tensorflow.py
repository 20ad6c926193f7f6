"""Several devices in one line, in TensorFlow, with Keras: ResNet-18 on Fashion-MNIST, with lockstep.wrap.

    python concise_tensorflow.py                  one CPU without Lockstep, then with it one and two, ten epochs
    python concise_tensorflow.py 10 gpu:0 gpu:1   the same on GPUs; on four or eight as well if they are named

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import sys
import time

import keras
from keras import layers

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")


def residual(x, num_channels, use_1x1conv=False, strides=1):
    """Two 3×3 convolutions, and the way around them."""
    around = layers.Conv2D(num_channels, 1, strides)(x) if use_1x1conv else x
    x = layers.Conv2D(num_channels, 3, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU()(x)
    x = layers.Conv2D(num_channels, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU()(x + around)


def resnet_block(x, num_channels, num_residuals, first_block=False):
    x = residual(x, num_channels, use_1x1conv=not first_block, strides=1 if first_block else 2)
    for _ in range(num_residuals - 1):
        x = residual(x, num_channels)
    return x


def resnet18(num_classes, in_channels=1):
    keras.utils.set_random_seed(0)
    image = keras.Input((28, 28, in_channels))
    x = layers.Conv2D(64, 3, padding="same", use_bias=False, name="stem")(image)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = resnet_block(x, 64, 2, first_block=True)
    x = resnet_block(x, 128, 2)
    x = resnet_block(x, 256, 2)
    x = resnet_block(x, 512, 2)
    return keras.Model(image, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(x)))


def examples(x, y):
    return x[..., None].astype("float32") / 255, y


def train_without_lockstep(batch_size, lr):
    """The baseline: Keras's own loop, on one device."""
    with keras.device(all_devices[0]):
        net = resnet18(num_classes=10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(lr), loss, metrics=["accuracy"])
    falling = keras.callbacks.LearningRateScheduler(lambda epoch: lr * (1 - epoch / int(num_epochs)))
    start = time.perf_counter()
    with keras.device(all_devices[0]):
        net.fit(*train_data, batch_size, int(num_epochs), verbose=0, callbacks=[falling])
    seconds = time.perf_counter() - start
    _, accuracy = net.evaluate(*test_data, batch_size, verbose=0)
    print(f"without Lockstep: {accuracy:.2f}, {seconds / int(num_epochs):.1f} sec/epoch, {seconds:.1f} sec in total")


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    net = resnet18(num_classes=10)
    sgd = keras.optimizers.SGD(lr)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = lockstep.wrap(net, sgd, loss, metrics=["accuracy"], devices=devices)
    plot = lockstep.Plot(f"concise_tensorflow_{num_devices}.png")
    falling = lockstep.LearningRateSchedule(lambda epoch: lr * (1 - epoch / int(num_epochs)))
    history = trainer.fit(
        train_data,
        epochs=int(num_epochs),
        batch_size=batch_size,
        validation_data=test_data,
        callbacks=[plot, falling],
    )
    print(f"number of devices: {len(trainer.devices)}, {sum(history.seconds):.1f} sec in total")
    for device, weight in zip(trainer.devices, trainer.copies("model.stem/kernel"), strict=True):
        print(device, weight.data[:, :, 0, 0])
    print("parallel inference:", trainer(test_data[0][:4]))
    print("parallel evaluation:", trainer.evaluate(test_data))
    print(trainer.digest())
    trainer.close()


train_data, test_data = (examples(*part) for part in fashion_mnist())
train_without_lockstep(batch_size=256, lr=0.1)
train(num_devices=1, batch_size=256, lr=0.1)
train(num_devices=2, batch_size=512, lr=0.2)
for num_devices in (4, 8):
    if num_devices <= len(all_devices):
        train(num_devices, batch_size=512, lr=0.2)  # the digest of two devices: it depends on the 8 shards
