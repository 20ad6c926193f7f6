"""The Keras guide to training on several GPUs: a checkpoint each epoch, and a restart from the newest.

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import torch
from torch import nn

import lockstep
from lockstep.datasets import fashion_mnist

(x, y), (x_test, y_test) = fashion_mnist()
x, x_test = (images.reshape(-1, 784).astype("float32") / 255 for images in (x, x_test))
train, val = (x[:-10_000], y[:-10_000]), (x[-10_000:], y[-10_000:])


def run_training(epochs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    trainer = lockstep.wrap(net, torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), metrics=["accuracy"])
    trainer.fit(train, epochs=epochs, batch_size=64, validation_data=val, checkpoint="ckpt")
    return trainer


run_training(epochs=1)  # creates the model and saves it,
trainer = run_training(epochs=2)  # goes on from the newest checkpoint: one more epoch
print(trainer.evaluate((x_test, y_test)))
print(trainer.digest())
