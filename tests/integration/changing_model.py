"""The model whose script changes it between steps. Apart from the tests, so that a worker need not import them."""

import torch
from torch import Tensor, nn

import lockstep


class Net(nn.Module):
    """Two layers, batch norm and dropout between them, and a head that joins the optimizer late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.first(x)).relu())
        return self.head(self.second(x).relu())


def start(devices: int) -> tuple[lockstep.Trainer, Net, torch.optim.Optimizer, nn.CrossEntropyLoss]:
    """A trainer with the net, the optimizer and the loss that it was made of."""
    torch.manual_seed(5)
    net = Net()
    held = [*net.first.parameters(), *net.norm.parameters(), *net.second.parameters()]
    optimizer = torch.optim.AdamW(held, lr=0.01)
    loss = nn.CrossEntropyLoss(weight=torch.ones(5))
    return lockstep.wrap(net, optimizer, loss, devices=devices, shards=6), net, optimizer, loss
