"""Several devices in one line, in TensorFlow, with Keras: ResNet-18 on Fashion-MNIST, with lockstep.wrap.

    python concise_tensorflow.py                    ten epochs on one CPU, then on two
    python concise_tensorflow.py 10 gpu:0 gpu:1   the same on GPUs

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import sys

import keras
from keras import layers

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")


def residual(x, channels, stride=1):
    """Two 3×3 convolutions, and the way around them."""
    around = x if x.shape[-1] == channels else layers.Conv2D(channels, 1, stride)(x)
    x = layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU()(x)
    x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU()(x + around)


def resnet18(num_classes, in_channels=1):
    keras.utils.set_random_seed(0)
    image = keras.Input((28, 28, in_channels))
    x = layers.Conv2D(64, 3, padding="same", use_bias=False, name="stem")(image)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = residual(residual(x, 64), 64)
    for channels in (128, 256, 512):
        x = residual(residual(x, channels, stride=2), channels)
    return keras.Model(image, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(x)))


def examples(x, y):
    return x[..., None].astype("float32") / 255, y


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    net = resnet18(num_classes=10)
    sgd = keras.optimizers.SGD(lr)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = lockstep.wrap(net, sgd, loss, metrics=["accuracy"], devices=devices)
    plot = lockstep.Plot(f"concise_tensorflow_{num_devices}.png")
    falling = lockstep.LearningRateSchedule(lambda epoch: lr * (1 - epoch / int(num_epochs)))
    trainer.fit(
        train_data,
        epochs=int(num_epochs),
        batch_size=batch_size,
        validation_data=test_data,
        callbacks=[plot, falling],
    )
    print("number of devices:", len(trainer.devices))
    for device, weight in zip(trainer.devices, trainer.copies("model.stem/kernel"), strict=True):
        print(device, weight.data[:, :, 0, 0])
    print("parallel evaluation:", trainer.evaluate(test_data))
    print(trainer.digest())
    trainer.close()


train_data, test_data = (examples(*part) for part in fashion_mnist())
train(num_devices=1, batch_size=256, lr=0.1)
train(num_devices=2, batch_size=512, lr=0.2)
