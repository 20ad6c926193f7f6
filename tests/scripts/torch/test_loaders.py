"""Loaders of other packages with a state of their own: a run goes on in the middle of an epoch with the same bits."""

import grain
import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import lockstep
from scripts.torch.loops import draw

X, Y = draw(40, 5), torch.arange(40) % 3


class Source:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index].numpy(), np.int64(Y[index])

    def __repr__(self):
        return "Source"


class Unnamed(Source):
    __repr__ = object.__repr__


class Stop(lockstep.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.trainer.num_steps == 8:
            raise InterruptedError


def read_records(source):
    sampler = grain.samplers.IndexSampler(len(X), grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=0)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(8)])


def stateful(num_workers):
    data = torch.utils.data.TensorDataset(X, Y)
    return StatefulDataLoader(data, batch_size=8, shuffle=True, num_workers=num_workers)


def fit(data, folder=None, devices=1, callbacks=()):
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters())
    checkpoint = folder and lockstep.Checkpoint(folder, every=1)
    with lockstep.wrap(net, optimizer, torch.nn.CrossEntropyLoss(), devices=devices, shards=2) as trainer:
        trainer.fit(data, epochs=4, checkpoint=checkpoint, callbacks=callbacks, verbose=0)
        return trainer.digest(), trainer.resumed


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: stateful(0), "by its state_dict"),
        (lambda: stateful(2), "by its state_dict"),
        (lambda: read_records(Source()), "by its iterator's state"),
        (lambda: read_records(Unnamed()), "by reading and dropping, because its iterator refused the saved state"),
        (lambda: grain.MapDataset.source(Source()).shuffle(seed=1).batch(8), "by its iterator's state"),
        (lambda: grain.MapDataset.source(Source()).batch(8).to_iter_dataset(), "by its iterator's state"),
    ],
)
def test_a_run_goes_on_by_the_loaders_state(make, words, tmp_path):
    whole, _ = fit(make())
    with pytest.raises(InterruptedError):
        fit(make(), tmp_path, callbacks=[Stop()])
    digest, resumed = fit(make(), tmp_path, devices=2)
    assert digest == whole
    assert "after 2 steps of epoch 2" in resumed
    assert words in resumed
