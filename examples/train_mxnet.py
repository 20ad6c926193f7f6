import sys

import mxnet as mx
from mxnet.gluon import loss, nn

import lockstep
from lockstep.datasets import digits

train, test = digits()
mx.random.seed(0)
net = nn.HybridSequential()
net.add(nn.Dense(128), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.2), nn.Dense(10))
net.initialize(mx.init.Xavier())
net.hybridize()
sgd = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
entropy = loss.SoftmaxCrossEntropyLoss()
trainer = lockstep.wrap(net, sgd, entropy, metrics=["accuracy"], devices=sys.argv[1:] or None)
history = trainer.fit(train, epochs=10, batch_size=256, validation_data=test)
history.to_csv("history.csv")
print(trainer.digest())
