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
