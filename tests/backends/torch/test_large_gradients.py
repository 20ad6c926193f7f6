"""Large gradients go into the partial sum while the backward pass still runs: the same bits as afterwards."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.backends.torch import gradients

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 5


class Layers(nn.Module):
    """A layer that is used twice, one that is not used, and one of another type."""

    def __init__(self):
        super().__init__()
        self.shared, self.unused, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5).bfloat16()

    def forward(self, x):
        return self.last(self.shared(self.shared(x).relu()).bfloat16()).float()


class Checkpointed(Layers):
    """Each use of the shared layer makes a backward pass of its own inside the shard's."""

    def forward(self, x):
        hidden = x.requires_grad_()
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        return self.last(hidden.bfloat16()).float()


def train(make, large, monkeypatch):
    monkeypatch.setattr(gradients, "LARGE", large)
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    seen = []
    hook = net.shared.weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=3, threads=1, seed=0) as trainer:
        norms = [trainer.step((X, Y), verbose=0)["grad_norm"].hex() for _ in range(3)]
        assert all(each.grad is None for each in net.parameters())
        assert seen
        assert net.unused.weight not in trainer.optimizer.state
        hook.remove()
        return norms, trainer.digest()


@pytest.mark.parametrize("make", [Layers, Checkpointed])
def test_moved_gradients_have_the_same_bits(make, monkeypatch):
    assert train(make, 1, monkeypatch) == train(make, 1000, monkeypatch)


def test_only_the_gradients_of_a_pass_that_are_small_are_there_after_it():
    large, small = nn.Linear(512, 512), nn.Linear(512, 2)
    trained = [*large.parameters(), *small.parameters()]
    fields = [torch.empty_like(each) for each in trained]
    with gradients.move_large_gradients(trained, fields) as moved:
        small(large(torch.ones(1, 512))).sum().backward()
    assert moved == {id(large.weight)}
    assert [each.grad is None for each in trained] == [True, False, False, False]
    assert gradients.copy_gradients(trained, fields, 0.5, (), moved) == [1, 1, 1, 1]
    assert torch.equal(fields[0], 0.5 * small.weight.detach().sum(0).repeat(512, 1).T)
