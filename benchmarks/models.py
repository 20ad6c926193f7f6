"""The PyTorch models that are measured, their batches, and the data they see."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

NUM_EXAMPLES = 16_384
NUM_CLASSES = 10
VOCABULARY, CONTEXT = 65, 64


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


class Residual(nn.Module):
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
        for block in (Residual(inputs, outputs, 2 if index else 1), Residual(outputs, outputs, 1))
    ]
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, NUM_CLASSES),
    )  # fmt: skip


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        split = self.inputs(x).view(size, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outputs(mixed.transpose(1, 2).reshape(size, length, width))


class TransformerBlock(nn.Module):
    """Attention, then two dense layers, each normalized before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        dense = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        self.dense = nn.Sequential(nn.LayerNorm(width), *dense)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.dense(x)


class GPT(nn.Module):
    """nanoGPT's small model for characters; gives logits with the classes first, as nn.CrossEntropyLoss takes them."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.blocks(x)).transpose(1, 2)


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Case:
    """One model at one batch size."""

    title: str
    model: Callable[[], nn.Module]
    batch_size: int
    optimizer: Callable[[nn.Module], optim.Optimizer] = sgd
    of_text: bool = False


CASES = {
    "mlp": Case("MLP 784-256-256-10", mlp, 256),
    "lenet": Case("LeNet 20-50-500-10", lenet, 256),
    "resnet18": Case("ResNet-18, 28×28×1", resnet18, 64),
    "gpt": Case("GPT, 4 layers × 128, 64 tokens", GPT, 64, adamw, of_text=True),
}


def data(case: Case) -> tuple[Tensor, Tensor]:
    """Inputs and targets in memory; their values do not matter here, and are the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    if case.of_text:
        text = torch.randint(0, VOCABULARY, (NUM_EXAMPLES, CONTEXT + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    images = torch.randn(NUM_EXAMPLES, 1, 28, 28, generator=generator)
    return images, torch.randint(0, NUM_CLASSES, (NUM_EXAMPLES,), generator=generator)


def trained(case: Case) -> tuple[nn.Module, optim.Optimizer, nn.Module]:
    """The model, its optimizer and the loss, the same for everyone who is measured."""
    torch.manual_seed(0)
    model = case.model()
    return model, case.optimizer(model), nn.CrossEntropyLoss()
