import sys

from torch import manual_seed, nn, optim

import lockstep
from lockstep.datasets import digits

train, test = digits()
manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
sgd = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
trainer = lockstep.wrap(net, sgd, nn.CrossEntropyLoss(), metrics=["accuracy"], devices=sys.argv[1:] or None)
history = trainer.fit(train, epochs=10, batch_size=256, validation_data=test)
history.to_csv("history.csv")
print(trainer.digest())
