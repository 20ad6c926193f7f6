"""One device and one shard: the bits of ten hand-written lines of torch."""

import copy
import hashlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.core import seeds

STEPS = 3


def plain(net, optimizer, loss, batches, clip_norm=None, precision=None):
    """The ten lines."""
    for step, (x, y) in enumerate(batches):
        torch.manual_seed(seeds.shard(0, step, 0))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = loss(net(x), y)
        value.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()


def bits(net, optimizer):
    """The sha256 of every parameter, buffer and array of the optimizer state."""
    slots = [value for slots in optimizer.state_dict()["state"].values() for _, value in sorted(slots.items())]
    found = hashlib.sha256()
    for value in [*net.state_dict().values(), *slots]:
        found.update(b"none" if value is None else value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def mlp(dtype=torch.float32, bias=True):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(97, 33, bias), nn.GELU(), nn.Linear(33, 10)).to(dtype)


def dropping():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(97, 33), nn.ReLU(), nn.Dropout(0.3), nn.Linear(33, 10))


def convolutional():
    torch.manual_seed(1)
    features = [nn.Conv1d(1, 6, 5), nn.BatchNorm1d(6), nn.ReLU(), nn.MaxPool1d(4), nn.Flatten()]
    return nn.Sequential(nn.Unflatten(1, (1, 97)), *features, nn.Linear(138, 10))


class Attentive(nn.Module):
    """Attention, layer norm and an embedding tied to the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(10, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.block(self.embedding((x[:, :12] * 3).long().abs() % 10)).mean(1))


def batches(size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    return [
        (torch.randn(size, 97, generator=generator).to(dtype), torch.randint(0, 10, (size,), generator=generator))
        for _ in range(STEPS)
    ]


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, **options)


def agree(make_net, make_optimizer, data, loss=None, **options):
    """Whether the plain loop and Lockstep end with the same bits, which are not those they began with."""
    loss = loss or nn.CrossEntropyLoss()
    net = make_net()
    optimizer = make_optimizer(net.parameters())
    plain(net, optimizer, loss, data, **options)
    own = make_net()
    own_optimizer = make_optimizer(own.parameters())
    start = bits(own, own_optimizer)
    with lockstep.wrap(
        own, own_optimizer, loss, devices=1, shards=1, threads=torch.get_num_threads(), seed=0, **options
    ) as trainer:
        for batch in data:
            trainer.step(batch)
    assert bits(own, own_optimizer) != start
    return bits(own, own_optimizer) == bits(net, optimizer)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(sgd(), id="sgd"),
        pytest.param(sgd(momentum=0.9, weight_decay=0.01), id="momentum"),
        pytest.param(sgd(momentum=0.9, nesterov=True), id="nesterov"),
        pytest.param(torch.optim.Adam, id="adam"),
        pytest.param(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1), id="adamw"),
        pytest.param(lambda parameters: torch.optim.Adam(parameters, amsgrad=True, fused=True), id="fused adam"),
        pytest.param(torch.optim.RMSprop, id="rmsprop"),
    ],
)
def test_optimizers_have_the_bits_of_the_plain_loop(make_optimizer):
    assert agree(mlp, make_optimizer, batches(27))


@pytest.mark.parametrize("size", [1, 7, 61, 64])
def test_batch_sizes_have_the_bits_of_the_plain_loop(size):
    assert agree(mlp, torch.optim.AdamW, batches(size))


@pytest.mark.parametrize("size", [7, 61])
@pytest.mark.parametrize(
    ("make_net", "loss", "options"),
    [
        pytest.param(dropping, None, {}, id="dropout"),
        pytest.param(convolutional, None, {}, id="convolution and batch norm"),
        pytest.param(Attentive, None, {}, id="attention and tied weights"),
        pytest.param(mlp, None, {"clip_norm": 0.1}, id="clipped"),
        pytest.param(mlp, None, {"clip_norm": 1e6}, id="not clipped"),
        pytest.param(mlp, None, {"precision": "bf16"}, id="bf16"),
        pytest.param(Attentive, None, {"precision": "bf16", "clip_norm": 0.1}, id="bf16 attention, clipped"),
        pytest.param(mlp, nn.CrossEntropyLoss(torch.arange(1.0, 11.0), ignore_index=3), {}, id="weighted"),
        pytest.param(mlp, nn.CrossEntropyLoss(reduction="sum"), {}, id="sum"),
        pytest.param(mlp, F.cross_entropy, {}, id="function"),
    ],
)
def test_models_losses_and_options_have_the_bits_of_the_plain_loop(make_net, loss, options, size):
    assert agree(make_net, sgd(momentum=0.9), batches(size), loss, **options)


@pytest.mark.parametrize("size", [7, 61])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_parameter_types(dtype, size):
    assert agree(lambda: mlp(dtype), torch.optim.AdamW, batches(size, dtype))


def test_a_frozen_layer_has_the_bits_of_the_plain_loop():
    def frozen():
        net = mlp()
        net[0].requires_grad_(False)
        return net

    assert agree(frozen, lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.1), batches(27))


def test_parameter_groups_and_a_scheduler_have_the_bits_of_the_plain_loop():
    loss, data = nn.CrossEntropyLoss(), batches(27)

    def made():
        net = mlp()
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.01, "momentum": 0.5}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    net, optimizer, schedule = made()
    own, own_optimizer, own_schedule = made()
    with lockstep.wrap(own, own_optimizer, loss, devices=1, shards=1, threads=torch.get_num_threads()) as trainer:
        for batch in data:
            plain(net, optimizer, loss, [batch])
            schedule.step()
            trainer.step(batch)
            own_schedule.step()
    assert bits(own, own_optimizer) == bits(net, optimizer)


def misaligned(values):
    """The same values in numpy's memory, 4 bytes off a cache line."""
    room = np.zeros(values.numel() + 32, np.float32)
    start = (4 - room.ctypes.data) % 64 // 4
    view = torch.from_numpy(room[start : start + values.numel()]).view(values.shape).copy_(values)
    assert view.data_ptr() % 64 == 4
    return view


def test_inputs_and_weights_are_aligned():
    """Kernels choose their algorithm by a pointer's alignment, and the algorithm decides the bits."""
    ((x, y), *_) = batches(27)
    seen = []

    class Looking(nn.Linear):
        def forward(self, x):
            seen.extend([x.data_ptr() % 64, self.weight.data_ptr() % 64, x.is_contiguous()])
            return super().forward(x)

    found = set()
    for shift in (lambda values: values.clone(), misaligned):
        torch.manual_seed(1)
        net = Looking(97, 10)
        net.weight.data = shift(net.weight.data)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=8, threads=1) as trainer:
            trainer.step((shift(x), y))
            trainer.step((shift(x.T.contiguous()).T, y))  # columns first
            found.add(trainer.digest())
    assert set(seen) == {0, True}
    assert len(found) == 1


class Idle(nn.Module):
    """A layer that no example uses, and one that only positive examples use."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.never = nn.Linear(3, 3)
        self.seldom = nn.Linear(97, 10)

    def forward(self, x):
        out = self.inner(x)
        return out + self.seldom(x) if (x > 0).all() else out


def test_a_parameter_unused_in_every_shard_is_skipped_by_the_optimizer():
    net = Idle()
    before = copy.deepcopy(net.never.state_dict())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=4, threads=1) as trainer:
        for x, y in batches(27):
            trainer.step((-x.abs(), y))
    for module in (net.never, net.seldom):
        assert all(parameter not in optimizer.state for parameter in module.parameters())
    assert all(torch.equal(net.never.state_dict()[name], value) for name, value in before.items())


def test_a_parameter_unused_in_some_shards_counts_as_zero_there():
    net = Idle().double()
    by_hand = copy.deepcopy(net)
    x = torch.cat([torch.rand(6, 97), -torch.rand(6, 97)]).double()
    y = torch.arange(12) % 10
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = copy.deepcopy(net.seldom.weight.detach())
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=4, threads=1) as trainer:
        trainer.step((x, y))
    sum(F.cross_entropy(by_hand(x[i : i + 3]), y[i : i + 3]) / 4 for i in range(0, 12, 3)).backward()
    torch.testing.assert_close(before - net.seldom.weight, by_hand.seldom.weight.grad, rtol=1e-12, atol=1e-12)


class Spectral(nn.Module):
    """Complex parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(97, 10, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


@pytest.mark.parametrize("make_optimizer", [sgd(momentum=0.9), torch.optim.Adam], ids=["sgd", "adam"])
def test_complex_parameters(make_optimizer):
    assert agree(Spectral, make_optimizer, batches(27))


class Constants(nn.Module):
    """Buffers of every kind: constants, counters, and one that is replaced at every pass."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("scale", torch.tensor([0.1, 0.2, 0.3]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.tensor([1 + 2j]))
        self.register_buffer("hidden", torch.tensor([0.7]), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.passes += 1
            self.mean = 0.5 * self.mean + x.mean()
        return self.inner(x) * self.scale[0]


def test_buffers_keep_their_bytes_unless_a_pass_writes_to_them():
    net = Constants()
    constant = {name: value.clone() for name, value in net.named_buffers() if name not in ("passes", "mean")}
    ((x, y), *_) = batches(61)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=8, threads=1) as trainer:
        trainer.step((x, y))
        trainer.step((x, y))
        trainer.evaluate((x, y))
    now = dict(net.named_buffers())
    assert len(constant) == 4
    assert all(torch.equal(now[name], value) for name, value in constant.items())
    assert now["passes"] == 2
    assert now["mean"].item() == pytest.approx(1.5 * x.mean().item(), rel=1e-5)


def test_batch_norm_in_evaluation_mode_stays_so():
    net = nn.Sequential(nn.Linear(97, 10), nn.BatchNorm1d(10))
    net[1].eval()
    before = copy.deepcopy(net[1].running_mean)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=2, threads=1) as trainer:
        ((x, y), *_) = batches(27)
        trainer.step((x, y))
        trainer.evaluate((x, y))
    assert (net.training, net[0].training, net[1].training) == (True, True, False)
    assert torch.equal(net[1].running_mean, before)


def channels_last():
    torch.manual_seed(1)
    convolution = nn.Conv2d(3, 8, 3)
    net = nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    net.to(memory_format=torch.channels_last)
    assert not convolution.weight.is_contiguous()
    return net


@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(lambda parameters: torch.optim.Adam(parameters, fused=True), id="adam"),
        pytest.param(sgd(momentum=0.9, fused=True), id="sgd"),
        pytest.param(lambda parameters: torch.optim.Adagrad(parameters, fused=True), id="adagrad"),
    ],
)
def test_a_fused_optimizer_walks_the_memory_of_weights_and_gradients_side_by_side(make_optimizer):
    """Also after a state was taken over, whose optimizer state needs the strides of the weights."""
    loss = nn.CrossEntropyLoss()
    images = torch.randn(STEPS, 8, 3, 9, 9)
    data = [(x.to(memory_format=torch.channels_last), torch.arange(8)) for x in images]
    assert agree(channels_last, make_optimizer, data)
    net = channels_last()
    optimizer = make_optimizer(net.parameters())
    plain(net, optimizer, loss, data)
    own = channels_last()
    own_optimizer = make_optimizer(own.parameters())
    with lockstep.wrap(own, own_optimizer, loss, devices=1, shards=1, threads=torch.get_num_threads()) as trainer:
        for batch in data:
            trainer.step(batch)
            trainer.load_state(trainer.state())
    assert bits(own, own_optimizer) == bits(net, optimizer)
