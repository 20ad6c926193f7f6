import sys

import optax
from flax import nnx

import lockstep
from lockstep.datasets import digits

train, test = digits()
rngs = nnx.Rngs(0)
dense, last = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)
net = nnx.Sequential(dense, nnx.BatchNorm(128, momentum=0.9, rngs=rngs), nnx.relu, nnx.Dropout(0.2, rngs=rngs), last)
loss = optax.softmax_cross_entropy_with_integer_labels
trainer = lockstep.wrap(net, optax.sgd(0.1, 0.9), loss, metrics=["accuracy"], devices=sys.argv[1:] or None)
history = trainer.fit(train, epochs=10, batch_size=256, validation_data=test)
history.to_csv("history.csv")
print(trainer.digest())
