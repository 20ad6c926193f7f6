"""The walk of one batch through PyTorch is the one on the page; JAX's is in tests/backends/jax."""

import torch

import lockstep
from docs import walk

FRAMES = []


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        FRAMES[:] = walk.on_the_stack()
        return self.layer(x)


def test_pytorch():
    net = Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = lockstep.wrap(net, sgd, torch.nn.CrossEntropyLoss(), devices=2, shards=4, exact=False)
    with trainer:
        assert len(trainer.devices) == 2
        trainer.fit((torch.randn(32, 4), torch.arange(32) % 3), batch_size=32, verbose=0)
    walk.check("PyTorch", FRAMES)
