"""The models that are measured, their batches, and the data they see."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn, optim

NUM_EXAMPLES = 16_384
NUM_CLASSES = 10


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, NUM_CLASSES)
    )


def lenet() -> nn.Module:
    """Caffe's LeNet, 431,080 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, NUM_CLASSES),
    )  # fmt: skip


class Block(nn.Module):
    """Two 3×3 convolutions and the way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.around(x))


def resnet18() -> nn.Module:
    """ResNet-18 for small images: a 3×3 stem and no pooling after it, 11,172,810 parameters."""
    widths = [64, 64, 128, 256, 512]
    blocks = [
        block
        for index, (inputs, outputs) in enumerate(pairwise(widths))
        for block in (Block(inputs, outputs, 2 if index else 1), Block(outputs, outputs, 1))
    ]
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, NUM_CLASSES),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model at one batch size, and what Lockstep must reach against DDP."""

    title: str
    model: Callable[[], nn.Module]
    batch_size: int
    steps: int  # in a block, about a second
    warmup: int  # steps before each block that are not timed
    target: float


CASES = {
    "mlp": Case("MLP 784-256-256-10", mlp, 256, steps=200, warmup=20, target=2.0),
    "lenet": Case("LeNet 20-50-500-10", lenet, 256, steps=15, warmup=2, target=1.05),
    "resnet": Case("ResNet-18, 28×28×1", resnet18, 64, steps=2, warmup=1, target=1.0),
}


def data() -> tuple[Tensor, Tensor]:
    """Images and labels in memory; their values do not matter here, and are the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_EXAMPLES, 1, 28, 28, generator=generator)
    return images, torch.randint(0, NUM_CLASSES, (NUM_EXAMPLES,), generator=generator)


def trained(case: Case) -> tuple[nn.Module, optim.Optimizer, nn.Module]:
    """The model, its optimizer and the loss, the same for everyone who is measured."""
    torch.manual_seed(0)
    model = case.model()
    return model, optim.SGD(model.parameters(), lr=0.01, momentum=0.9), nn.CrossEntropyLoss()
