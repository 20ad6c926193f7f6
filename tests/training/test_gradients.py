"""What `trainer.gradients` leaves as it is, and what `trainer.apply` does with what a script gives it."""

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.errors import BatchError, StateError

DATA = np.random.default_rng(0).standard_normal((16, 6)), np.arange(16) % 3


def wrap():
    return lockstep.wrap(Dense([6, 5, 3], seed=1, dropout=0.5), SGD(0.1), "cross_entropy", devices=1, shards=4)


def test_a_step_draws_the_same_numbers_after_any_number_of_passes(tmp_path):
    """So a run that is saved after a pass goes on from the checkpoint as it would have gone on."""
    with wrap() as one, wrap() as other:
        one.gradients(DATA, verbose=0)
        one.gradients(DATA, verbose=0)
        for trainer in (one, other):
            trainer.step(DATA, verbose=0)
        assert one.digest() == other.digest()


def test_passes_of_one_step_draw_different_numbers():
    with wrap() as trainer:
        first, second = (trainer.gradients(DATA, verbose=0) for _ in range(2))
        assert any((first[name] != second[name]).any() for name in first)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x, head):
        return self.heads[int(head[0])](x)


def test_a_gradient_for_a_parameter_that_the_pass_has_not_used_is_applied():
    net = TwoHeads()
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    before = net.heads[1].weight.detach().clone()
    with lockstep.wrap(net, sgd, nn.CrossEntropyLoss(), devices=1, shards=2) as trainer:
        used = trainer.gradients(
            ((torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)), torch.arange(8) % 2), verbose=0
        )
        assert not used["heads.1.weight"].any()
        used["heads.1.weight"] += 1
        trainer.apply(used)
    assert torch.equal(net.heads[1].weight, before - 1)


def test_the_norm_of_a_pass_cannot_be_read_after_the_update():
    with wrap() as trainer:
        gradients = trainer.gradients(DATA, verbose=0)
        assert gradients.logs["grad_norm"] > 0
        trainer.apply(gradients)
        with pytest.raises(StateError, match="no longer in memory"):
            gradients.logs["grad_norm"]


def test_complex_gradients_of_real_parameters_are_refused():
    with wrap() as trainer:
        gradients = trainer.gradients(DATA, verbose=0)
        gradients["0.weight"] = gradients["0.weight"] * 1j
        with pytest.raises(BatchError, match=r"must be real numbers of type float64. Got complex128"):
            trainer.apply(gradients)
