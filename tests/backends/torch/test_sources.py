"""torch's data sets and loaders: the whole batch, in an order of (seed, epoch)."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import lockstep
from lockstep.errors import BatchError

X = torch.randn(27, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(27) % 3
PAIRS = TensorDataset(X, Y)


def wrapped(**options):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=2, threads=1, **options)


def fitted(data, global_seed=0, epochs=2, **options):
    """The digest after fitting the data, and the seed that the script had set."""
    with wrapped(**options) as trainer:
        random.seed(global_seed)
        np.random.seed(global_seed)
        torch.manual_seed(global_seed)
        trainer.fit(data(), epochs=epochs, batch_size=8, verbose=0)
        return trainer.digest()


class Noisy(Dataset):
    """Draws from three generators for every example."""

    def __len__(self):
        return 27

    def __getitem__(self, index):
        return X[index] + torch.randn(5) + random.random() + np.random.rand(), Y[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def own_sampler():
    generator = torch.Generator()
    generator.seed()  # another order every time, were it not seeded
    return RandomSampler(PAIRS, generator=generator)


LOADERS = {
    "loader": lambda: DataLoader(PAIRS, batch_size=8, shuffle=True),
    "loader with a generator": lambda: DataLoader(PAIRS, 8, shuffle=True, generator=torch.Generator()),
    "sampler with a generator": lambda: DataLoader(PAIRS, 8, sampler=own_sampler()),
    "batch sampler with a generator": lambda: DataLoader(PAIRS, batch_sampler=BatchSampler(own_sampler(), 8, False)),
    "noisy loader": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True),
    "data set": lambda: PAIRS,
    "noisy data set": Noisy,
}


@pytest.mark.parametrize("data", LOADERS)
def test_the_order_follows_from_the_runs_seed_alone(data):
    first = fitted(LOADERS[data], global_seed=1)
    assert fitted(LOADERS[data], global_seed=2) == first
    assert fitted(LOADERS[data], global_seed=1, seed=5) != first


@pytest.mark.parametrize("data", LOADERS)
def test_every_epoch_has_an_order_of_its_own(data):
    with wrapped() as trainer:
        source = trainer._source(LOADERS[data](), 8, shuffle=True)
        epochs = [[batch[1].tolist() for batch in source.epoch(index)] for index in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [8, 8, 8, 3]
        assert sorted(label for batch in epoch for label in batch) == sorted(Y.tolist())


def test_a_data_set_is_read_like_its_arrays():
    assert fitted(lambda: PAIRS) == fitted(lambda: (X, Y))


def test_streams_have_no_length():
    with wrapped() as trainer:
        history = trainer.fit(Stream(), epochs=2, batch_size=8, verbose=0)
        assert trainer._run.step == 8
        assert len(history.history["loss"]) == 2


def test_a_loader_keeps_its_own_batch_size():
    with wrapped() as trainer:
        trainer.fit(DataLoader(PAIRS, batch_size=9), batch_size=2, verbose=0)
        assert trainer._run.step == 3
        assert trainer.predict(DataLoader(PAIRS, batch_size=4)).shape == (27, 3)
        expected = trainer.evaluate((X, Y), batch_size=27)
        assert trainer.evaluate(DataLoader(PAIRS, batch_size=4)) == pytest.approx(expected, rel=1e-6)


def test_a_distributed_sampler_is_refused():
    loader = DataLoader(PAIRS, batch_size=8, sampler=DistributedSampler(PAIRS, num_replicas=2, rank=0))
    with wrapped() as trainer, pytest.raises(BatchError) as caught:
        trainer.fit(loader)
    assert str(caught.value) == "The batch is the whole batch. Remove the sampler."


def test_worker_processes_of_a_loader_draw_alike():
    def loader():
        return DataLoader(Noisy(), batch_size=9, shuffle=True, num_workers=1)

    assert fitted(loader, global_seed=1, epochs=1) == fitted(loader, global_seed=2, epochs=1)


class Both(nn.Linear):
    def forward(self, left, right):
        return super().forward(left) - 2 * super().forward(right)


class Nested(Dataset):
    """Two inputs and a target: collated, the inputs are a list."""

    def __len__(self):
        return 27

    def __getitem__(self, index):
        return (X[index], X[-index - 1]), Y[index]


@pytest.mark.parametrize(
    "data",
    [Nested(), DataLoader(Nested(), 9), [[[X[i : i + 9], X.flip(0)[i : i + 9]], Y[i : i + 9]] for i in (0, 9, 18)]],
    ids=["data set", "loader", "lists"],
)
def test_several_inputs(data):
    torch.manual_seed(0)
    net = Both(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=2, threads=1) as trainer:
        expected = trainer.evaluate(((X, X.flip(0)), Y), batch_size=9)
        assert trainer.evaluate(data, batch_size=9) == expected
        trainer.fit(data, batch_size=9, verbose=0)
        assert trainer._run.step == 3
