"""One GPU, one to three processes on it: the same bits. Skipped where there is no GPU."""

import pytest
import torch
from torch import nn

import lockstep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip = nn.Identity() if inputs == outputs and stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet(width: int = 64) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for index in range(4):
        outputs = width * 2**index
        layers += [Block(channels, outputs, 2 if index else 1), Block(outputs, outputs, 1)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


CASES = [
    # model, precision, clip, shards
    (lenet, None, None, 4),
    (lenet, "fp16", 1.0, 4),
    (lenet, None, 0.05, 4),  # a norm that clips: it must be taken where the parameters are
    (resnet, "bf16", None, 4),
    (resnet, None, None, 8),
]


def digests(make, precision, clip, shards, devices):
    torch.manual_seed(0)
    net = make()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(317, 1, 28, 28, generator=generator)
    y = torch.randint(0, 10, (317,), generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    with lockstep.wrap(
        net, optimizer, nn.CrossEntropyLoss(), metrics=["accuracy"], devices=devices, shards=shards,
        precision=precision, clip_norm=clip,
    ) as trainer:  # fmt: skip
        assert len(trainer.devices) == len(devices)
        found = []
        for start in range(0, 317, 61):
            logs = trainer.step((x[start : start + 61], y[start : start + 61]))
            found.append((*(logs[name].hex() for name in ("loss", "accuracy", "grad_norm")), trainer.digest()))
        found.append(tuple(value.hex() for value in trainer.evaluate((x, y)).values()))
        assert trainer.predict(x).shape == (317, 10)
        return found


@pytest.mark.parametrize("make, precision, clip, shards", CASES)
def test_any_number_of_processes_on_one_gpu_gives_the_same_bits(make, precision, clip, shards):
    one = digests(make, precision, clip, shards, ["cuda:0"])
    assert one == digests(make, precision, clip, shards, ["cuda:0"]), "not even repeatable"
    for count in (2, 3):
        assert digests(make, precision, clip, shards, ["cuda:0"] * count) == one, count


def test_the_script_gets_its_model_back_on_its_device():
    net = lenet()
    with lockstep.wrap(net, torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), devices=["cuda:0"]) as trainer:
        trainer.step((torch.zeros(8, 1, 28, 28), torch.zeros(8, dtype=torch.long)))
        assert trainer(torch.zeros(3, 1, 28, 28)).device == torch.device("cuda:0")
        assert all(parameter.device == torch.device("cuda:0") for parameter in net.parameters())


def test_a_model_that_lies_on_the_gpu_reaches_a_worker():
    net = lenet().cuda()
    optimizer = torch.optim.Adam(net.parameters())
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=["cuda:0"] * 2, shards=2) as trainer:
        for _ in range(2):
            trainer.step((torch.randn(8, 1, 28, 28).cuda(), torch.zeros(8, dtype=torch.long).cuda()))
        trainer.digest()


def test_labels_out_of_range_leave_the_gpu_usable():
    net = lenet()
    x, y = torch.randn(8, 1, 28, 28), torch.zeros(8, dtype=torch.long)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=["cuda:0"], shards=2) as trainer:
        with pytest.raises(lockstep.LockstepError, match="Labels must be from 0 to 9"):
            trainer.step((x, y + 10))
        trainer.step((x, torch.where(torch.arange(8) < 4, -100, y)))  # ignored targets are no labels
