"""What a script changes between two steps is found by comparison; what it leaves alone is not read again."""

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.backends.torch.replica import Replica
from lockstep.errors import ModelError


class Net(nn.Module):
    """Attributes of several kinds; one buffer lies where no integer of 8 bytes begins, and one is not contiguous."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.empty = nn.Identity()
        self.scales = (1.0, [1.0, 2.0])
        self.log = [0.0] * 200
        self.mask = torch.ones(4)
        self.register_buffer("odd", torch.zeros(9)[1:])
        self.register_buffer("short", torch.zeros(3))
        self.register_buffer("turned", torch.zeros(2, 3).T)


def create(lr=0.1):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    optimizer.decay = [0.5]
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    replica = Replica(net, optimizer, nn.CrossEntropyLoss(weight=torch.ones(3)), torch.device("cpu"))
    return replica, net, optimizer


def delete_scales(net, optimizer):
    del net.scales


def add_group(net, optimizer):
    optimizer.param_groups[0]["params"], rest = optimizer.param_groups[0]["params"][:2], net.norm.parameters()
    optimizer.add_param_group({"params": list(rest)})


SETTINGS = [
    lambda net, optimizer: setattr(net.norm, "momentum", 0.5),
    lambda net, optimizer: setattr(net.norm, "training", False),
    lambda net, optimizer: setattr(net.empty, "new", "word"),
    delete_scales,
    lambda net, optimizer: net.scales[1].__setitem__(1, 3.0),
    lambda net, optimizer: net.log.clear(),
    lambda net, optimizer: setattr(net, "mask", torch.zeros(4)),
    lambda net, optimizer: net.mask.zero_(),
    lambda net, optimizer: net.layer.bias.requires_grad_(False),
    lambda net, optimizer: optimizer.param_groups[0].update(lr=0.2),
    lambda net, optimizer: optimizer.param_groups[0].update(betas=[0.5, 0.9]),
    lambda net, optimizer: optimizer.decay.append(0.1),
    add_group,
    lambda net, optimizer: net.layer.weight.register_hook(lambda gradient: gradient),
]
STATE = [
    lambda net, optimizer: net.layer.weight.data.mul_(2),
    lambda net, optimizer: net.layer.bias.detach().numpy().__setitem__(0, 7.0),
    lambda net, optimizer: setattr(net.layer.weight, "data", torch.ones(4, 4)),
    lambda net, optimizer: net.odd.data.__setitem__(3, 1.0),
    lambda net, optimizer: net.short.data.__setitem__(2, 1.0),
    lambda net, optimizer: net.turned.data.__setitem__((2, 1), 1.0),
    lambda net, optimizer: net.norm.running_mean.data.add_(1),
    lambda net, optimizer: net.norm.num_batches_tracked.data.add_(1),
    lambda net, optimizer: net.norm(torch.randn(8, 4)),
    lambda net, optimizer: optimizer.state[net.layer.weight]["exp_avg"].zero_(),
    lambda net, optimizer: optimizer.state[net.layer.weight].update(step=torch.tensor(9.0)),
    lambda net, optimizer: optimizer.state.clear(),
]


@pytest.mark.parametrize("change", SETTINGS)
def test_changed_settings_are_read_again(change):
    replica, net, optimizer = create()
    before = replica.controls()
    assert replica.controls() is before
    change(net, optimizer)
    after = replica.controls()
    assert after is not before
    assert replica.controls() is after


def test_a_module_in_a_module_that_had_none_is_refused():
    replica, net, _ = create()
    replica.controls()
    net.empty.new = nn.Identity()
    with pytest.raises(ModelError, match="A module or parameter of the model was replaced"):
        replica.controls()


@pytest.mark.parametrize("change", STATE)
def test_a_write_to_the_state_is_reported_once(change):
    replica, net, optimizer = create()
    replica.controls()
    assert not replica.touched()
    assert not replica.touched()
    change(net, optimizer)
    assert replica.touched()
    assert not replica.touched()
    change(net, optimizer)
    replica.accept_writes()
    assert not replica.touched()


def test_values_of_swapped_tensors_are_seen():
    """The sum over both is the same."""
    replica, net, _ = create()
    net.norm.weight.data, net.norm.bias.data = torch.arange(4.0), torch.ones(4)
    replica.touched()
    weight, bias = (each.detach().numpy() for each in (net.norm.weight, net.norm.bias))
    weight[:], bias[:] = bias.copy(), weight.copy()
    assert replica.touched()


def test_a_rate_that_is_a_tensor_is_read_before_each_step():
    replica, _, optimizer = create(torch.tensor(0.1))
    assert float(replica.controls()["groups"][0]["numbers"]["lr"]) == np.float32(0.1)
    optimizer.param_groups[0]["lr"].data.fill_(0.2)
    assert replica.controls() is not replica.controls()


def test_an_update_alone_does_not_make_the_settings_look_changed():
    """Else every step would read all of them in full."""
    replica, _, optimizer = create()
    before = replica.controls()
    for _ in range(2):
        optimizer.step()
        assert replica.controls() is before
