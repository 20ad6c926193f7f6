"""Torch models for the parity runs. Apart from the tests, so that a worker need not import them.

Starting a worker costs seconds, a step milliseconds. So four models live in one,
and each batch says which of them it is for; what a batch does not use keeps no
gradient and is left alone, as in plain torch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import lockstep

VOCABULARY = 29


class LeNet(nn.Module):
    """LeNet-5 for 16×16 images, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Sequential(
            *(nn.Linear(256, 120), nn.ReLU(), nn.Dropout(0.5)),
            *(nn.Linear(120, 84), nn.ReLU(), nn.Dropout(0.25), nn.Linear(84, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class Block(nn.Module):
    """A transformer block between an embedding and an output head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.block = nn.TransformerEncoderLayer(24, nhead=3, dim_feedforward=40, dropout=0.1, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens))).transpose(1, 2)  # classes on axis 1


class Basic(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.short = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layers(x) + self.short(x))


class ResNet18(nn.Sequential):
    """ResNet-18 with a 3×3 stem, `width` channels in its first stage."""

    def __init__(self, width: int) -> None:
        stages: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
        for stage in range(4):
            outputs = width << stage
            stages += [Basic(inputs, outputs, 1 if stage == 0 else 2), Basic(outputs, outputs, 1)]
            inputs = outputs
        super().__init__(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Four(nn.Module):
    """An MLP of 97 features, LeNet, the block and a narrow ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(97, 33), nn.ReLU(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 10))
        self.lenet = LeNet()
        self.block = Block()
        self.resnet = ResNet18(width=4)

    def forward(self, model: str, x: Tensor) -> Tensor:
        return getattr(self, model)(x)


@lockstep.objective
def loss(model, batch):
    """Cross-entropy of the model that the batch names, with the accuracy beside it."""
    outputs = model(batch["model"], batch["x"])
    accuracy = (outputs.argmax(1) == batch["y"]).float().mean()
    return functional.cross_entropy(outputs, batch["y"]), {"accuracy": accuracy}


def wrapped(devices: int) -> lockstep.Trainer:
    """The four models on so many devices; no shards, threads or seed given."""
    torch.manual_seed(7)
    net = Four()
    groups = [
        {"params": [*net.mlp.parameters(), *net.lenet.parameters()]},
        # and that is AdamW
        {"params": net.block.parameters(), "weight_decay": 0.01, "decoupled_weight_decay": True},
        {"params": net.resnet.parameters(), "weight_decay": 1e-4, "decoupled_weight_decay": True},
    ]
    return lockstep.wrap(net, torch.optim.Adam(groups, lr=3e-3), loss, devices=devices)


def features(count: int) -> dict[str, object]:
    """Random examples for the MLP."""
    return {"model": "mlp", "x": torch.randn(count, 97), "y": torch.randint(10, (count,))}


def images(count: int) -> dict[str, object]:
    """Random examples for LeNet."""
    return {"model": "lenet", "x": torch.randn(count, 1, 16, 16), "y": torch.randint(10, (count,))}


def tokens(count: int) -> dict[str, object]:
    """Random examples for the block."""
    return {"model": "block", "x": torch.randint(VOCABULARY, (count, 7)), "y": torch.randint(VOCABULARY, (count, 7))}


def small_images(count: int) -> dict[str, object]:
    """Random examples for ResNet-18."""
    return {"model": "resnet", "x": torch.randn(count, 1, 12, 12), "y": torch.randint(10, (count,))}
