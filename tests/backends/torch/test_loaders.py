"""torch's data sets and loaders: complete batches, in an order that follows from (seed, epoch)."""

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
    default_collate,
)

import lockstep
from lockstep.backends.torch import loaders as torch_loaders
from lockstep.core.batches import Rows
from lockstep.data import arrays, loaders
from lockstep.data.reader import Readers
from lockstep.errors import BatchError

X = torch.randn(27, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(27) % 3
PAIRS = TensorDataset(X, Y)


def wrapped(**options):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=2, threads=1, **options)


def size_for(data):
    """The batch size to ask for: a loader has its own."""
    return None if isinstance(data, DataLoader) else 8


def fitted(data, global_seed=0, epochs=2, **options):
    """The digest after fitting the data, and the seed that the script had set."""
    with wrapped(**options) as trainer:
        random.seed(global_seed)
        np.random.seed(global_seed)
        torch.manual_seed(global_seed)
        given = data()
        trainer.fit(given, epochs=epochs, batch_size=size_for(given), verbose=0)
        return trainer.digest()


def read(batch):
    """Returns the batch itself, if a source gives a reference."""
    return Readers().read([batch])[0] if isinstance(batch, Rows) else batch


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
    generator.seed()  # another order every time, unless it is seeded
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
        given = LOADERS[data]()
        source = trainer.session.open_data(given, size_for(given), shuffle=True)
        epochs = [[read(batch)[1].tolist() for batch in source.epoch(index)] for index in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [8, 8, 8, 3]
        assert sorted(label for batch in epoch for label in batch) == sorted(Y.tolist())


def test_a_data_set_is_read_like_its_arrays():
    assert fitted(lambda: PAIRS) == fitted(lambda: (X, Y))


def test_streams_have_no_length():
    with wrapped() as trainer:
        history = trainer.fit(Stream(), epochs=2, batch_size=8, verbose=0)
        assert trainer.session.run.step == 8
        assert len(history.history["loss"]) == 2


def test_a_loader_keeps_its_own_batch_size():
    with wrapped() as trainer:
        trainer.fit(DataLoader(PAIRS, batch_size=9), verbose=0)
        assert trainer.session.run.step == 3
        trainer.fit(DataLoader(PAIRS, batch_size=9), batch_size=9, verbose=0)  # the same said twice
        assert trainer.session.run.step == 6
        assert trainer.predict(DataLoader(PAIRS, batch_size=4)).shape == (27, 3)
        expected = trainer.evaluate((X, Y), batch_size=27)
        assert trainer.evaluate(DataLoader(PAIRS, batch_size=4)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("loader", "own"),
    [
        (lambda: DataLoader(PAIRS, batch_size=9), "batches of 9 already"),
        (lambda: DataLoader(PAIRS, batch_sampler=BatchSampler(own_sampler(), 8, False)), "batches already"),
        (lambda: [(X[:8], Y[:8])], "batches already"),
        (lambda: ((X[i : i + 9], Y[i : i + 9]) for i in (0, 9)), "batches already"),
        (lambda: arrays(X, Y).batch(9), "batches of 9 already"),
    ],
)
def test_another_batch_size_beside_data_in_batches_is_refused(loader, own):
    with wrapped() as trainer:
        before = trainer.digest()
        for use in (trainer.fit, trainer.evaluate, trainer.predict):
            data = loader()
            with pytest.raises(BatchError) as caught:
                use(data, batch_size=2)
            kind = type(data).__name__
            assert str(caught.value) == (
                f"batch_size=2 cannot be used with this {kind}, because it yields {own}. Leave batch_size out to use "
                f"these batches, or create the {kind} with batches of 2."
            )
        assert trainer.digest() == before


def test_a_distributed_sampler_is_refused():
    loader = DataLoader(PAIRS, batch_size=8, sampler=DistributedSampler(PAIRS, num_replicas=2, rank=0))
    with wrapped() as trainer, pytest.raises(BatchError) as caught:
        trainer.fit(loader)
    assert str(caught.value) == (
        "The DataLoader has a DistributedSampler, which gives every process other examples, but Lockstep splits "
        "each batch over the devices itself. Remove the sampler."
    )


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
def test_several_inputs_are_passed_to_the_model(data):
    torch.manual_seed(0)
    net = Both(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=2, threads=1) as trainer:
        expected = trainer.evaluate(((X, X.flip(0)), Y), batch_size=9)
        size = None if isinstance(data, list) else 9
        assert trainer.evaluate(data, batch_size=size) == expected
        trainer.fit(data, batch_size=size, verbose=0)
        assert trainer.session.run.step == 3


# -- resumed epochs, and the number of a loader's workers


class SeveralAtOnce(Noisy):
    def __getitem__(self, index):
        raise AssertionError

    def __getitems__(self, indices):
        return [(X[index] + torch.rand(1), Y[index]) for index in indices]


def jittered(examples):
    x, y = default_collate(examples)
    return x + random.random(), y


def started(worker):
    """The loader's own function for its workers."""
    assert torch.utils.data.get_worker_info().num_workers == 2


class Answers:
    """A batch sampler that answers in arrays, tensors, and whatever can be iterated."""

    def __iter__(self):
        return iter([np.arange(8), torch.arange(8, 16), range(16, 24), (24, 25, 26)])

    def __len__(self):
        return 4


RESUMED = {
    "shuffled": lambda **options: DataLoader(Noisy(), 8, shuffle=True, **options),
    "with a generator": lambda **options: DataLoader(Noisy(), 8, shuffle=True, generator=torch.Generator(), **options),
    "its own sampler": lambda **options: DataLoader(Noisy(), 8, sampler=own_sampler(), **options),
    "a batch sampler": lambda **options: DataLoader(
        Noisy(), batch_sampler=BatchSampler(own_sampler(), 8, True), **options
    ),
    "a drawing collate": lambda **options: DataLoader(Noisy(), 8, collate_fn=jittered, **options),
    "several at once": lambda **options: DataLoader(SeveralAtOnce(), 8, shuffle=True, **options),
    "arrays from a batch sampler": lambda **options: DataLoader(Noisy(), batch_sampler=Answers(), **options),
    "several at once by arrays": lambda **options: DataLoader(SeveralAtOnce(), batch_sampler=Answers(), **options),
    "batches by a sampler": lambda **options: DataLoader(
        PAIRS, sampler=BatchSampler(own_sampler(), 8, False), batch_size=None, **options
    ),
    "no batches": lambda **options: DataLoader(
        [(X[i : i + 9], Y[i : i + 9]) for i in (0, 9, 18)], batch_size=None, shuffle=True, **options
    ),
}


def epoch(loader, index, start=0):
    found = torch_loaders.find_source(loader, 8, True, 3)
    assert found.resumes == "by its sampler"
    return [tuple(part.numpy().tobytes() for part in batch) for batch in found.epoch(index, start)]


@pytest.mark.parametrize("kind", RESUMED)
def test_an_epoch_can_begin_at_any_batch(kind):
    torch.manual_seed(1)
    whole = epoch(RESUMED[kind](), 1)
    assert len(whole) in (3, 4)
    torch.manual_seed(2)
    for start in range(len(whole) + 1):
        assert epoch(RESUMED[kind](), 1, start) == whole[start:]


@pytest.mark.parametrize(
    "kind", ["with a generator", "a drawing collate", "several at once", "arrays from a batch sampler"]
)
def test_any_number_of_a_loaders_workers_gives_the_same_bytes(kind):
    alone = [epoch(RESUMED[kind](), index, 1) for index in (0, 1)]
    assert alone[0] != alone[1]
    loader = RESUMED[kind](num_workers=2, worker_init_fn=started, persistent_workers=True, prefetch_factor=3)
    found = torch_loaders.find_source(loader, 8, True, 3)
    for index in (0, 1):
        assert [tuple(part.numpy().tobytes() for part in batch) for batch in found.epoch(index, 1)] == alone[index]


def test_batches_before_the_resumed_one_are_not_read():
    seen = []

    class Watched(Noisy):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    list(torch_loaders.find_source(DataLoader(Watched(), 8), 8, True, 0).epoch(0, 2))
    assert seen == list(range(16, 27))


def test_batches_of_a_stream_before_the_resumed_one_are_dropped():
    found = torch_loaders.find_source(DataLoader(Stream(), 8), 8, True, 0)
    assert found.resumes == "by reading and dropping"
    whole = [batch[1].tolist() for batch in found.epoch(0)]
    assert [batch[1].tolist() for batch in found.epoch(0, 2)] == whole[2:]


class StatefulStream(IterableDataset):
    """Gives examples and has a state; a loaded state is used for every later epoch."""

    def __init__(self, examples):
        self.examples, self.place, self.start = examples, 0, 0

    def __iter__(self):
        for place in range(self.start, len(self.examples)):
            self.place = place
            yield self.examples[place]

    def state_dict(self):
        return {"place": self.place + 1}

    def load_state_dict(self, state):
        self.start = state["place"]


def test_a_stream_of_examples_with_a_state_is_batched_and_resumes_exactly():
    with wrapped() as trainer:
        found = trainer.session.open_data(StatefulStream(PAIRS), 8, shuffle=True)
        assert found.resumes == "by reading and dropping"
        whole = [batch[1].tolist() for batch in found.epoch(0)]
        assert [len(batch) for batch in whole] == [8, 8, 8, 3]
        again = trainer.session.open_data(StatefulStream(PAIRS), 8, shuffle=True)
        assert [batch[1].tolist() for batch in again.epoch(0, 2, found.state())] == whole[2:]
        for index in (1, 2):
            assert [batch[1].tolist() for batch in again.epoch(index)] == whole


class FreshlyShuffled(IterableDataset):
    """A stream in the order of a new generator without a seed."""

    def __iter__(self):
        return iter(np.random.default_rng().permutation(24))


def test_a_new_generator_without_a_seed_in_a_stream_follows_from_seed_and_epoch():
    def epoch(index, start=0):
        found = torch_loaders.find_source(FreshlyShuffled(), 4, True, 0)
        return [batch.tolist() for batch in found.epoch(index, start)]

    whole = epoch(1)
    assert epoch(1, 2) == whole[2:]
    assert epoch(0) != whole


def test_examples_that_may_be_batches_are_refused_with_both_readings():
    sequences = [(torch.full((10, 5), float(index)), torch.arange(10)) for index in range(6)]
    with wrapped() as trainer:
        with pytest.raises(BatchError) as caught:
            next(trainer.session.open_data(StatefulStream(sequences), 4, shuffle=True).epoch(0))
        assert str(caught.value) == (
            "An IterableDataset with a state_dict may give examples, or whole batches. This one gives "
            "(Tensor(10, 5), Tensor(10,)), which may be one example or a batch of 10. For examples use "
            "fit(DataLoader(dataset, batch_size=32)), for batches fit(DataLoader(dataset, batch_size=None))."
        )
        for size, count in ((4, 2), (None, 6)):
            found = trainer.session.open_data(
                DataLoader(StatefulStream(sequences), batch_size=size), None, shuffle=True
            )
            assert len(list(found.epoch(0))) == count
            assert len(list(found.epoch(0, 1))) == count - 1


class Stateful(DataLoader):
    """Has a state in tensors, like torchdata's."""

    given = 0

    def __iter__(self):
        for index, batch in enumerate(super().__iter__()):
            if index >= self.given:
                self.given = index + 1
                yield batch
        self.given = 0

    def state_dict(self):
        return {"given": torch.tensor(self.given), "list": [1, 2]}

    def load_state_dict(self, state):
        self.given = int(state["given"])


def test_a_loader_with_its_own_state_resumes_from_it():
    with wrapped() as trainer:
        first, second = (trainer.session.open_data(Stateful(PAIRS, 8, shuffle=True), 8, shuffle=True) for _ in range(2))
    assert first.resumes == "by its state_dict"
    read = first.epoch(1)
    before = [next(read)[1].tolist(), next(read)[1].tolist()]
    state = first.state()
    assert state["given"]["lockstep:tensor"] == 2
    after = [batch[1].tolist() for batch in read]
    assert [batch[1].tolist() for batch in second.epoch(1, 2, state)] == after
    assert sorted(label for batch in before + after for label in batch) == sorted(Y.tolist())


class Drawing(Stateful):
    """Keeps the state that its generator had before the epoch, too."""

    def __iter__(self):
        self.before = self.generator.get_state()
        return super().__iter__()

    def state_dict(self):
        return {"given": self.given, "generator": self.before}

    def load_state_dict(self, state):
        self.given = state["given"]
        self.generator.set_state(state["generator"])


@pytest.mark.parametrize("kind", [Stateful, Drawing])
@pytest.mark.parametrize("num", [2, 4])  # in the middle of an epoch, and at its end
def test_a_loader_with_a_state_and_a_generator(kind, num):
    first, second = (
        loaders.open_loader(kind(PAIRS, 8, shuffle=True, generator=torch.Generator()), 3) for _ in range(2)
    )
    read = first.epoch(0)
    for _ in range(num):
        next(read)
    state = first.state()
    if num == 4:
        assert next(read, None) is None
        state = first.state()
        read = first.epoch(1)
    expected = [batch[1].tolist() for batch in read]
    found = second.epoch(1, 0, state) if num == 4 else second.epoch(0, num, state)
    assert [batch[1].tolist() for batch in found] == expected


@pytest.mark.parametrize("devices", [1, 2])
def test_a_data_set_is_read_by_the_processes_that_compute(devices):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=2, threads=1) as trainer:
        trainer.fit(Noisy(), epochs=2, batch_size=8, verbose=0)
        assert trainer.digest() == fitted(Noisy)


class Pooled(nn.Linear):
    """Takes a list with a tensor of any length for each example."""

    def forward(self, xs):
        return super().forward(torch.stack([x.mean(0) for x in xs]))


def test_a_list_with_a_tensor_for_each_example_is_accepted_from_any_source():
    xs, ys = [X[i : i + 1 + i % 3] for i in range(12)], Y[:12]

    def collate(pairs):
        return [x for x, _ in pairs], torch.stack([y for _, y in pairs])

    def steps(trainer):
        for start in range(0, 12, 4):
            trainer.step((xs[start : start + 4], ys[start : start + 4]))

    loader = DataLoader(list(zip(xs, ys, strict=True)), batch_size=4, collate_fn=collate)
    found = set()
    for use in (
        steps,
        lambda trainer: trainer.fit((xs, ys), batch_size=4, shuffle=False, verbose=0),
        lambda trainer: trainer.fit(loader, verbose=0),
    ):
        torch.manual_seed(0)
        net = Pooled(5, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=2, threads=1) as trainer:
            use(trainer)
            found.add(trainer.digest())
    assert len(found) == 1
