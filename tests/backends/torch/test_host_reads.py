"""Nothing that the device computes is read shard by shard: a step reads once, when its sums are needed."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.backends.torch.shard_pass import TorchShards
from lockstep.core.weighing import Share
from parity.models import Block, LeNet

READS = ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "cpu")


def mlp():
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 10)), torch.randn(32, 20), 10


def lenet():
    return LeNet(), torch.randn(32, 1, 16, 16), 10


def block():
    return Block(), torch.randint(0, 29, (32, 7)), 29


def make_batch(make):
    torch.manual_seed(0)
    model, inputs, classes = make()
    shape = (32, 7) if make is block else (32,)
    return model, (inputs, torch.randint(0, classes, shape))


class CountReads(TorchDispatchMode):
    """Counts the operations whose result depends on a tensor's values on the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"):
            self.found.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    """The reads of the shards' passes, and those of the whole steps."""
    counts = {"shard": [], "step": []}
    for name in READS:
        plain = getattr(torch.Tensor, name)

        def counted(self, *arguments, plain=plain, name=name, **options):
            counts["step"].append(name)
            return plain(self, *arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, counted)
    compute = TorchShards.compute

    def watched(self, *arguments):
        before = len(counts["step"])
        with CountReads() as operations:
            result = compute(self, *arguments)
        counts["shard"] += operations.found + counts["step"][before:]
        return result

    monkeypatch.setattr(TorchShards, "compute", watched)
    return counts


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("make", [mlp, lenet, block])
def test_a_shard_reads_nothing_and_a_step_once(reads, make, shards):
    model, batch = make_batch(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.wrap(
        model, optimizer, nn.CrossEntropyLoss(), metrics=["accuracy"], devices=1, shards=shards
    ) as trainer:
        for _ in range(10):  # attributes are tried and queues looked for in the first steps
            trainer.step(batch, verbose=0)
        for found in reads.values():
            found.clear()
        trainer.step(batch, verbose=0)
        assert reads["shard"] == []
        assert reads["step"] == ["tolist"]


def test_a_read_is_found(reads):
    model, batch = make_batch(mlp)

    def loss(outputs, targets):
        value = nn.functional.cross_entropy(outputs, targets)
        return value if value > 0 else value * 2

    with lockstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, devices=1, shards=8) as trainer:
        trainer.step(batch, verbose=0)
        reads["shard"].clear()
        trainer.step(batch, verbose=0)
        assert reads["shard"].count("aten::_local_scalar_dense") == 8


@pytest.mark.parametrize("make", [mlp, lenet, block])
def test_a_shards_pass_can_be_traced(make):
    """Which a compiled or captured pass needs. Without random numbers, because tracing does not keep their seed."""
    model, batch = make_batch(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.wrap(
        model.eval(), optimizer, nn.CrossEntropyLoss(), metrics=["accuracy"], devices=1, shards=8
    ) as trainer:
        program = trainer.session.backend._shards._program
        parameters = list(model.parameters())

        def run(inputs, targets):
            term = program.compute(model, (inputs, targets), Share(32, 0.125, alone=False))
            gradients = torch.autograd.grad(term.root, parameters)
            parts, _ = program.measure(term, 32)
            return [*gradients, *(value.detach() for value, _ in parts if isinstance(value, torch.Tensor))]

        traced = make_fx(run)(*batch)
        other = torch.roll(batch[0], 1, 0), torch.roll(batch[1], 1, 0)
        for one, another in zip(run(*other), traced(*other), strict=True):
            assert torch.equal(one, another)
