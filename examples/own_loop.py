"""A loop of your own: a scheduler, a learning rate set by hand, and a layer frozen on the way.

The model and the optimizer are the script's own objects. What is changed on them between two steps reaches every
replica before the next.
"""

import torch
from torch import nn

import lockstep
from lockstep.datasets import digits

BATCH_SIZE = 250

(x, y), test = digits()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
trainer = lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), metrics=["accuracy"], devices=["cpu", "cpu"])

for epoch in range(8):
    if epoch == 6:
        net[0].requires_grad_(False)  # from here on only the last layer learns,
        optimizer.param_groups[0]["lr"] = 0.01  # and slowly
    for start in range(0, len(x), BATCH_SIZE):
        logs = trainer.step((x[start : start + BATCH_SIZE], y[start : start + BATCH_SIZE]))
    rate = optimizer.param_groups[0]["lr"]
    print(
        f"epoch {epoch + 1}: loss {logs['loss']:.4f}, gradient norm {logs['grad_norm']:.3f}, learning rate {rate:.3f}"
    )
    if epoch < 6:
        scheduler.step()

print(trainer.evaluate(test))
print(trainer.digest())
