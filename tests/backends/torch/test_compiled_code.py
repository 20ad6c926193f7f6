"""Compiled code is refused wherever it is, because it may give other bits in another process."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.backends.torch import settings
from lockstep.errors import ModelError

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


compile_ = partial(torch.compile, backend="eager")  # less the import of the rest of the compiler


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def wrapped(net, loss=None, optimizer=None, devices=1, **options):
    loss = nn.CrossEntropyLoss() if loss is None else loss
    return lockstep.wrap(net, optimizer or sgd(net), loss, devices=devices, shards=4, threads=1, **options)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))


def double(x):
    return 2 * x


fast = compile_(double)


def helper(x):
    return fast(x)


class Decorated(nn.Linear):
    @compile_
    def forward(self, x):
        return super().forward(x)


class Calling(nn.Linear):
    def forward(self, x):
        return super().forward(helper(x))


def compiled_in_place():
    net = network()
    net.compile(backend="eager")
    return net


def compiled_layer_in_place():
    net = network()
    net[0].compile(backend="eager")
    return net


def compiled_layer():
    net = network()
    net[0] = compile_(net[0])
    return net


def held_function():
    net = network()
    net.act = compile_(F.gelu)
    return net


def listed_function():
    net = network()
    net.acts = [F.gelu, compile_(F.relu)]
    return net


def replaced_forward():
    net = network()
    net.forward = compile_(net.forward)
    return net


def scripted_layer():
    net = network()
    net[0] = torch.jit.script(net[0])
    return net


def compiled_loss_in_place():
    loss = nn.CrossEntropyLoss()
    loss.compile(backend="eager")
    return loss


@lockstep.objective
def objective(net, batch):
    return F.cross_entropy(net(helper(batch[0])), batch[1])


def closed_over():
    called = compile_(double)

    def loss(outputs, targets):
        return F.cross_entropy(called(outputs), targets)

    return loss


class Weighing:
    """A loss that is an object."""

    def __init__(self):
        self.act = compile_(double)

    def __call__(self, outputs, targets):
        return F.cross_entropy(self.act(outputs), targets)


START = "An exact run needs plain PyTorch code, but "
BITS = ". Compiled code may give other bits in another process. "
END = (
    ", with lockstep.wrap(..., compile=True), which on CPUs compiles the model and the loss in every process; or use "
    "lockstep.wrap(..., exact=False)."
)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (compiled_in_place, "compile() was called on the model, Sequential. Leave that call out"),
        (compiled_layer_in_place, "compile() was called on the model's '0', Linear. Leave that call out"),
        (compiled_layer, "the model's '0' is compiled with torch.compile. Use the module itself, its _orig_mod"),
        (held_function, "'act' of the model is compiled with torch.compile. Use the plain function"),
        (listed_function, "'acts' of the model contains an object compiled with torch.compile. Use the plain function"),
        (replaced_forward, "'forward' of the model is compiled with torch.compile. Use the plain function"),
        (lambda: Decorated(5, 3), "Decorated.forward is compiled with torch.compile. Use the plain function"),
        (lambda: Calling(5, 3), "'fast', which the model uses, is compiled with torch.compile. Use the plain function"),
        (scripted_layer, "the model's '0' is compiled with TorchScript. Use the module that was scripted or traced"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_refused(make, said):
    with pytest.raises(ModelError) as caught:
        wrapped(make())
    assert str(caught.value) == START + said.replace(". ", BITS) + END


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: compile_(nn.CrossEntropyLoss()), "the loss is compiled with torch.compile. Use the module itself"),
        (compiled_loss_in_place, "compile() was called on the loss, CrossEntropyLoss. Leave that call out"),
        (lambda: compile_(F.cross_entropy), "the loss is compiled with torch.compile. Use the plain function"),
        (lambda: partial(compile_(F.cross_entropy), label_smoothing=0.1), "the loss is compiled with torch.compile"),
        (lambda: objective, "'fast', which the loss uses, is compiled with torch.compile"),
        (closed_over, "'called', which the loss uses, is compiled with torch.compile"),
        (Weighing, "'act' of the loss is compiled with torch.compile"),
    ],
)
def test_compiled_losses_are_refused(make, said):
    with pytest.raises(ModelError) as caught:
        wrapped(network(), make())
    assert str(caught.value).startswith(START + said.replace(". ", BITS))


def test_a_compiled_metric_and_a_compiled_optimizer_step_are_refused():
    with pytest.raises(ModelError, match=r"the metric 'double' is compiled with torch\.compile"):
        wrapped(network(), metrics=[compile_(double)])
    net = network()
    optimizer = sgd(net)
    optimizer.step = compile_(optimizer.step)
    with pytest.raises(ModelError, match=r"optimizer\.step is compiled with torch.compile"):
        wrapped(net, optimizer=optimizer)


@pytest.mark.parametrize(
    ("change", "devices"),
    [
        (lambda net: net.compile(backend="eager"), 1),
        (lambda net: setattr(net[1], "act", fast), 1),
        (lambda net: setattr(net[1], "act", fast), 2),
    ],
)
def test_a_model_compiled_after_wrap_is_refused_at_the_next_step(change, devices):
    net = network()
    with wrapped(net, devices=devices) as trainer:
        assert len(trainer.devices) == devices
        trainer.step((X, Y))
        before = trainer.digest()
        change(net)
        with pytest.raises(ModelError) as caught:
            trainer.step((X, Y))
        assert str(caught.value).startswith(START)
        assert trainer.digest() == before


@pytest.mark.skipif(settings.FORCE_EAGER is None, reason="this torch cannot turn its compiler off")
def test_compiled_code_that_is_not_found_runs_uncompiled():
    """A function in an object's list, on one and two devices, beside the plain one."""

    class Box:
        pass

    def never(graph, inputs):
        raise AssertionError("compiled")

    def loss(box, outputs, targets):
        return F.cross_entropy(box.inner[0].function(outputs), targets)

    found = set()
    for devices, function in ((1, double), (1, torch.compile(double, backend=never)), (2, double)):
        box = Box()
        box.inner = [Box()]
        box.inner[0].function = function
        with wrapped(network(), partial(loss, box), devices=devices) as trainer:
            trainer.step((X, Y))
            found.add(trainer.digest())
    assert len(found) == 1


def test_a_function_excluded_from_compilation_is_allowed():
    net = network()
    net.act = torch.compiler.disable(double)
    wrapped(net).step((X, Y))


@pytest.mark.parametrize("make", [compiled_in_place, compiled_layer, held_function])
def test_compiled_code_is_allowed_on_one_device_if_not_exact(make):
    trainer = wrapped(make(), exact=False)
    trainer.step((X, Y))
    assert trainer.digest().startswith("inexact:")


def test_compiled_code_is_allowed_on_two_devices_if_not_exact():
    with wrapped(compiled_in_place(), devices=2, exact=False) as trainer:
        assert len(trainer.devices) == 2
        first = trainer.step((X, Y))["loss"]
        assert trainer.step((X, Y))["loss"] < first
