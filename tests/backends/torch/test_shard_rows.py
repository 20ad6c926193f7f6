"""The sums of shards, and what is left when a pass fails: cases in which a pass is made twice, or raises."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.backends.torch.shard_rows import ShardRows
from lockstep.core.shard_sums import OwnSummand, Summand

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


class Leaving(nn.Module):
    """Leaves a tensor in an attribute, so that the first shards are computed twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        outputs = self.layer(x)
        self.last = outputs.detach()
        return outputs


def wrap(model, shards, **options):
    return lockstep.wrap(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), devices=1, shards=shards, **options
    )


@pytest.mark.parametrize("shards", [1, 4])
def test_a_pass_that_is_made_twice_counts_once(shards):
    with wrap(Leaving(), shards) as trainer, wrap(Leaving(), shards, exact=False) as other:
        for _ in range(6):
            found, expected = (each.step((X, Y), verbose=0) for each in (trainer, other))
            assert found["loss"] == expected["loss"]


def test_a_row_of_its_own_and_values_that_change_afterwards():
    rows, value = ShardRows(), torch.tensor([2.0])
    for shard in (3, 5, 3):  # the first shard twice
        rows.add(shard, [Summand(value, 1.0), Summand(4), Summand(0.0)], is_mean=shard == 3)
    value.fill_(7.0)
    assert rows.read(3) == {3: [8.0, 4.0, 0.0], 5: [2.0, 4.0, 0.0]}
    assert rows.select(3).read(3) == {3: [8.0, 4.0, 0.0]}


def test_a_mean_over_nothing_is_to_be_divided():
    rows = ShardRows()
    rows.add(0, [Summand(torch.tensor(float("nan"))), Summand(torch.tensor(0)), Summand(0.0)], is_mean=True)
    assert rows.read(3)[0] == [0.0, 0.0, 1.0]


def test_bools_are_counted_also_in_shards_of_unequal_sizes():
    rows = ShardRows()
    rows.add(0, [OwnSummand(torch.tensor(0.1)), OwnSummand(torch.tensor([True, True, False])), Summand(3)])
    rows.add(1, [OwnSummand(torch.tensor(0.2)), OwnSummand(torch.tensor([True, False])), Summand(2)])
    first, second = torch.tensor([0.1, 0.2]).tolist()
    assert rows.read(4) == {0: [first, 2.0, 3.0, 0.0], 1: [second, 1.0, 2.0, 0.0]}


def test_integers_beside_floats_stay_exact():
    rows = ShardRows()
    rows.add(0, [OwnSummand(torch.tensor(0.5)), OwnSummand(torch.tensor(2**24 + 1)), Summand(0.0)])
    assert rows.read(3) == {0: [0.5, 2.0**24 + 1, 0.0]}


def test_shards_whose_metrics_have_unequal_forms():
    rows = ShardRows()
    head = [Summand(torch.tensor(1.0)), Summand(4), Summand(0.0)]
    rows.add(0, [*head, Summand(torch.tensor([1.0, 2.0]))])
    rows.add(1, [*head, Summand(torch.tensor([3.0]))])
    assert rows.read(5) == {0: [1.0, 4.0, 0.0, 1.0, 2.0], 1: [1.0, 4.0, 0.0, 3.0, 0.0]}


class Writing(nn.Module):
    """Writes its weight in every pass, and raises in the second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.passes = []

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        if x.shape[0] == 3:
            raise ValueError("the second shard")
        return self.layer(x)


def test_a_weight_that_a_failing_pass_has_written_is_restored():
    with wrap(Writing(), 2) as trainer:
        before = trainer.digest()
        with pytest.raises(ValueError, match="the second shard"):
            trainer.step((X[:7], Y[:7]), verbose=0)
        assert trainer.digest() == before


@pytest.mark.parametrize("shards", [1, 4])
def test_a_conjugated_complex_parameter(shards):
    class Conjugated(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight.conj()).abs()

    model, plain = Conjugated(), Conjugated()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    with wrap(model, shards) as trainer:
        for _ in range(2):
            trainer.step((X, Y), verbose=0)
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(X), Y).backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)
