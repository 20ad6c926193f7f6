"""Sources: every example once an epoch in an order of (seed, epoch), and resuming in an epoch."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.pipelines import LABELS, Pairs
from lockstep.checkpoint import json_codec
from lockstep.core.batches import OBJECTIVE_EXAMPLE, Rows, leaves
from lockstep.data import ArraySource, IterableSource, arrays, indexed, source, stream
from lockstep.data.loaders import StatefulSource, open_loader
from lockstep.data.reader import Readers
from lockstep.data.source import PipelineSource, StreamSource
from lockstep.errors import BatchError, ExactError, StateError


def rows(source, epoch=0):
    return [batch[0].tolist() for batch in source.epoch(epoch)]


@given(st.integers(1, 60), st.integers(1, 70), st.booleans(), st.integers(0, 9))
def test_an_epoch_holds_every_example_once(num_examples, batch_size, shuffle, epoch):
    numbers = np.arange(num_examples)
    arrays = ArraySource((numbers, {"same": numbers * 10}), batch_size, shuffle, seed=3)
    seen = list(arrays.epoch(epoch))
    assert arrays.num_examples == num_examples
    assert arrays.num_steps == len(seen)
    assert [len(batch[0]) for batch in seen[:-1]] == [batch_size] * (len(seen) - 1)
    joined = np.concatenate([batch[0] for batch in seen])
    assert sorted(joined) == list(range(num_examples))
    assert shuffle or joined.tolist() == list(range(num_examples))
    assert all((batch[1]["same"] == batch[0] * 10).all() for batch in seen)  # rows stay together


def test_the_order_depends_on_seed_and_epoch():
    data = (np.arange(40),)
    first = ArraySource(data, 7, True, seed=0)
    assert rows(first, 1) == rows(ArraySource(data, 7, True, seed=0), 1)
    assert rows(first, 0) != rows(first, 1)
    assert rows(first, 0) != rows(ArraySource(data, 7, True, seed=1), 0)


def test_iterables_of_batches():
    batches = [(np.zeros(2), np.ones(2)), [np.zeros(3), np.ones(3)]]
    listed = IterableSource(batches)
    assert listed.num_steps == 2
    assert [[type(batch) for batch in listed.epoch(epoch)] for epoch in (0, 1)] == [[tuple, tuple]] * 2
    assert IterableSource(iter(batches)).num_steps is None


def test_a_generator_that_is_used_up():
    once = IterableSource(iter([np.zeros(2)]))
    assert len(list(once.epoch(0))) == 1
    with pytest.raises(BatchError) as caught:
        list(once.epoch(1))
    assert str(caught.value) == (
        "Epoch 2 has no batch, because a generator can be read only once. "
        "Use a list, a loader or arrays, or epochs=1 or steps_per_epoch."
    )


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (np.zeros((3, 2)), ArraySource),
        ((np.zeros(3), np.zeros(3)), ArraySource),
        ({"x": np.zeros(3)}, ArraySource),
        ([np.zeros(3)], IterableSource),
        (iter([np.zeros(3)]), IterableSource),
        (arrays(np.zeros(3)), PipelineSource),
        (arrays(np.zeros(3)).batch(3), PipelineSource),
        (stream([1, 2]), StreamSource),
        (Pairs(), PipelineSource),  # no __iter__: examples by index
    ],
)
def test_the_source_for_each_kind_of_data(data, kind):
    assert isinstance(source.open_source(data, 2, False, 0), kind)


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        (
            3,
            2,
            "Data must be (inputs, targets), a pytree of arrays, a data set, a loader or an iterable of "
            "batches. Got int. Use for example fit((x, y), ...).",
        ),
        (
            "text",
            2,
            "Data must be (inputs, targets), a pytree of arrays, a data set, a loader or an iterable of "
            "batches. Got str. Use for example fit((x, y), ...).",
        ),
        (
            (np.zeros(3), np.zeros(2)),
            2,
            "The arrays of a batch have different lengths, 3, 2, in (ndarray(3,), ndarray(2,)). "
            "Use arrays with one entry per example.",
        ),
        (
            (1, 2),
            2,
            "The batch (int, int) has no array with examples on its first axis. "
            f"Use (inputs, targets), or write an objective:\n{OBJECTIVE_EXAMPLE}",
        ),
    ],
)
def test_unusable_data_is_refused(data, batch_size, message):
    with pytest.raises(BatchError) as caught:
        source.open_source(data, batch_size, False, 0)
    assert str(caught.value) == message


# -- resuming in the middle of an epoch


class Loader:
    """A loader with a state."""

    batch_size = 2

    def __init__(self):
        self.place = self.start = 0
        self.read = []

    def __len__(self):
        return 4

    def __iter__(self):
        places, self.start = range(self.start, 4), 0
        for place in places:
            self.place = place + 1
            self.read.append(place)
            yield np.full(2, place)

    def state_dict(self):
        return {"place": self.place, "more": [(1, 2.5), "text", np.arange(3)], "one": np.int64(3)}

    def load_state_dict(self, state):
        self.start = state["place"]


class GrainIterator:
    """An iterator as grain's: with a state of its own, which is bytes or a dict."""

    def __init__(self, owner, as_bytes):
        self.owner, self.as_bytes, self.place = owner, as_bytes, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == 4:
            raise StopIteration
        if self.owner.fails_at == self.place:
            raise OSError("the disk is gone")
        self.owner.read.append(self.place)
        self.place += 1
        return np.full(2, self.place - 1)

    def get_state(self):
        state = {"place": self.place, "source": self.owner.name}
        return json.dumps(state).encode() if self.as_bytes else state

    def set_state(self, state):
        found = json.loads(state) if self.as_bytes else state
        self.place = 3  # a part of the state, before it is refused
        if found["source"] != self.owner.name:
            raise ValueError("the source is another")
        self.place = found["place"]


class GrainLoader:
    """A loader as grain's `DataLoader` and `IterDataset`, which have no state themselves."""

    def __init__(self, as_bytes, name="digits"):
        self.as_bytes, self.name, self.read, self.fails_at = as_bytes, name, [], None

    def __iter__(self):
        return GrainIterator(self, self.as_bytes)


SOURCES = {
    "arrays": lambda: source.open_source(np.arange(8), 2, True, 3),
    "pipeline": lambda: source.open_source(arrays(np.arange(8)).shuffle(3).batch(2), 2, True, 0),
    "pipeline without a batch": lambda: source.open_source(arrays(np.arange(8)).shuffle(3), 2, True, 0),
    "data set": lambda: source.open_source(Pairs(), 10, True, 3),
    "endless": lambda: source.open_source(arrays(np.arange(5)).shuffle(3).repeat().batch(2), 2, True, 0),
    "stream": lambda: source.open_source(stream(range(8)), 2, True, 0),
    "endless stream": lambda: source.open_source(stream(range(5)).repeat().batch(2), 2, True, 0),
    "list": lambda: source.open_source([np.full(2, index) for index in range(4)], 2, True, 0),
    "loader with a state": lambda: source.open_source(Loader(), 2, True, 0),
    "grain's DataLoader": lambda: source.open_source(GrainLoader(True), 2, True, 0),
    "grain's IterDataset": lambda: source.open_source(GrainLoader(False), 2, True, 0),
}


def values(read, num):
    """The first batches, as lists."""
    found = []
    readers = Readers()
    for batch in read:
        if isinstance(batch, Rows):
            (batch,) = readers.read([batch])
        found.append(batch[1].tolist() if isinstance(batch, tuple) else batch.tolist())
        if len(found) == num:
            break
    return found


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("index", [0, 1])
def test_an_epoch_can_be_read_from_any_batch(kind, index):
    if "endless" in kind and index:
        return  # it has one epoch
    whole = values(SOURCES[kind]().epoch(index), 4)
    assert len(whole) == 4
    for start in range(4):
        read = SOURCES[kind]()
        assert values(read.epoch(index, start), 4 - start) == whole[start:]
        assert values(read.epoch(index), 4) == whole  # and again from its beginning


@pytest.mark.parametrize(
    ("kind", "num_examples", "num_steps", "batch_size", "endless", "resumes"),
    [
        ("arrays", 8, 4, 2, False, "at once"),
        ("pipeline", 8, 4, 2, False, "at once"),
        ("pipeline without a batch", 8, 4, 2, False, "at once"),
        ("data set", len(LABELS), 4, 10, False, "at once"),
        ("endless", None, None, 2, True, "at once"),
        ("stream", None, None, 2, False, "by reading and dropping"),
        ("endless stream", None, None, 2, True, "by reading and dropping"),
        ("list", None, 4, None, False, "by reading and dropping"),
        ("loader with a state", None, 4, 2, False, "by its state_dict"),
        ("grain's DataLoader", None, None, None, False, "by its iterator's state"),
        ("grain's IterDataset", None, None, None, False, "by its iterator's state"),
    ],
)
def test_attributes_of_sources(kind, num_examples, num_steps, batch_size, endless, resumes):
    found = SOURCES[kind]()
    assert (found.num_examples, found.num_steps, found.batch_size) == (num_examples, num_steps, batch_size)
    assert (found.endless, found.once, found.resumes) == (endless, False, resumes)
    if resumes in ("at once", "by reading and dropping"):
        assert found.state() is None


def test_generators_can_be_read_only_once():
    assert source.open_source(iter([np.zeros(2)]), 2, False, 0).once
    assert source.open_source(stream(iter(range(4))), 2, False, 0).once
    used = source.open_source(stream(iter(range(4))), 2, False, 0)
    assert len(list(used.epoch(0))) == 2
    with pytest.raises(BatchError, match="Epoch 2 has no batch, because a generator can be read only once"):
        list(used.epoch(1))


class Unmeasured:
    """Can be read again, and has no length."""

    def __iter__(self):
        return iter([0.0, 0.0])


def drawn(value):
    return value + np.random.rand()


@pytest.mark.parametrize(
    "moved",
    [
        lambda pipeline: pipeline.repeat().take(4).batch(4),
        lambda pipeline: pipeline.repeat().take(3).batch(2),
        lambda pipeline: pipeline.take(1).repeat().take(3).batch(2),
        lambda pipeline: pipeline.repeat().batch(2).take(3),
        lambda pipeline: pipeline.batch(1).repeat().take(3),
        lambda pipeline: pipeline.batch(1).take(1).repeat().take(2),
    ],
)
def test_a_streams_rounds_are_epochs_as_those_of_arrays(moved):
    def epochs(pipeline):
        found = source.open_source(moved(pipeline.map(drawn, random=True)), 2, False, 0)
        return [values(found.epoch(index), 9) for index in range(3)]

    streamed = epochs(stream([0.0, 0.0]))
    assert streamed == epochs(arrays(np.zeros(2)))
    for each in (streamed, epochs(stream(Unmeasured()))):  # whose rounds' numbers leave gaps
        every = [value for epoch in each for batch in epoch for value in batch]
        assert len(set(every)) == len(every)  # no epoch draws what another did


@pytest.mark.parametrize("as_bytes", [True, False])
def test_the_state_of_a_loaders_iterator(as_bytes):
    first = source.open_source(GrainLoader(as_bytes), 2, True, 0)
    read = first.epoch(1)
    assert values([next(read), next(read)], 2) == [[0, 0], [1, 1]]
    state = json_codec.decode(*json_codec.encode({"state": first.state()}))["state"]
    loader = GrainLoader(as_bytes)
    again = source.open_source(loader, 2, True, 0)
    assert values(again.epoch(1, 2, state), 9) == [[2, 2], [3, 3]]
    assert loader.read == [2, 3]  # nothing was read twice
    assert values(again.epoch(2), 9) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert values(again.epoch(2, 0, state), 9) == [[0, 0], [1, 1], [2, 2], [3, 3]]  # the state of an ended epoch
    assert values(again.epoch(1, 3), 9) == [[3, 3]]  # of a checkpoint without a state


def test_a_state_that_an_iterator_refuses():
    """Grain compares the sources' reprs, which differ between processes if they show an address."""
    first = source.open_source(GrainLoader(True, "at 0x1"), 2, True, 0)
    next(first.epoch(0))
    again = source.open_source(GrainLoader(True, "at 0x2"), 2, True, 0)
    assert values(again.epoch(0, 1, first.state()), 9) == [[1, 1], [2, 2], [3, 3]]
    assert again.resumes == "by reading and dropping, because its iterator refused the saved state"


def test_a_failed_read_of_an_iterator_with_a_state():
    loader = GrainLoader(False)
    loader.fails_at = 2
    found = source.open_source(loader, 2, True, 0)
    with pytest.raises(OSError, match="the disk is gone"):
        list(found.epoch(0))
    assert found.state() is None


def test_a_loaders_own_state():
    first = SOURCES["loader with a state"]()
    read = first.epoch(0)
    assert values([next(read), next(read)], 2) == [[0, 0], [1, 1]]
    state = first.state()
    assert state["place"] == 2
    assert state["more"][:2] == [(1, 2.5), "text"]
    loader = Loader()
    again = source.open_source(loader, 2, True, 0)
    assert isinstance(again, StatefulSource)
    assert values(again.epoch(0, 2, state), 2) == [[2, 2], [3, 3]]
    assert loader.read == [2, 3]  # nothing before it


def test_a_loaders_state_that_cannot_be_stored_is_refused():
    loader = Loader()
    loader.state_dict = lambda: {"who": object()}
    with pytest.raises(StateError) as caught:
        source.open_source(loader, 2, True, 0).state()
    assert str(caught.value) == (
        "state_dict()['who'] is a object, which a checkpoint cannot store. Use a number, a string, a numpy "
        "array, or a list, tuple or dict of these; or train without a checkpoint."
    )


class Counting:
    """A loader with an order for each epoch, which it counts itself; at the end of one it stands before the next."""

    def __init__(self):
        self.epoch = self.place = 0
        self.resumed = False

    def __iter__(self):
        self.place, self.resumed = self.place if self.resumed else 0, False
        order = np.random.RandomState(self.epoch).permutation(6)
        while self.place < 3:
            self.place += 1
            yield order[2 * self.place - 2 : 2 * self.place]
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.epoch, self.place, self.resumed = state["epoch"], state["place"], True


class Sticky(Loader):
    """Begins every epoch with the state that was loaded, as Hugging Face's streams do; cannot say it before."""

    counts = 0
    loaded = None

    def __iter__(self):
        self.state = {"place": 0}
        for place in range((self.loaded or {"place": 0})["place"], 4):
            self.state = {"place": place + 1}
            yield np.full(2, place)

    def state_dict(self):
        return None if self.loaded is None and not hasattr(self, "state") else dict(self.state)

    def load_state_dict(self, state):
        self.loaded = state


@pytest.mark.parametrize("start", [1, 3, 4])
def test_epochs_after_a_resumed_one_are_complete(start):
    first = source.open_source(Sticky(), 2, True, 0)
    expected = values(first.epoch(0), start)
    state = first.state()
    again = source.open_source(Sticky(), 2, True, 0)
    assert expected + values(again.epoch(0, start, state), 9) == values(first.epoch(0), 9)
    for index in (1, 2):
        assert values(again.epoch(index), 9) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    new = source.open_source(Sticky(), 2, True, 0)  # saved at the end of an epoch
    assert values(new.epoch(1, 0, {"place": 4}), 9) == [[0, 0], [1, 1], [2, 2], [3, 3]]


class Stuck(Sticky):
    """Cannot be brought back."""

    def load_state_dict(self, state):
        self.loaded = state or self.loaded


def test_a_loader_that_reuses_a_loaded_state_is_refused():
    again = source.open_source(Stuck(), 2, True, 0)
    values(again.epoch(0, 2, {"place": 2}), 9)
    with pytest.raises(
        ExactError, match=r"Change the loader's __iter__ so that a state from load_state_dict\(\) is used only once"
    ):
        values(again.epoch(1), 9)


class Broken(Loader):
    """Moves on before it fails."""

    def __iter__(self):
        for place in range(self.start, 4):
            self.place = place + 1
            if place == 2 and self.fails:
                raise KeyError
            yield np.full(2, place)


def test_the_state_after_a_failed_read_is_the_one_before():
    loader = Broken()
    loader.fails = True
    first = source.open_source(loader, 2, True, 0)
    read = first.epoch(0)
    assert first.state()["place"] == 0  # a run is saved where it begins
    with pytest.raises(KeyError):
        list(read)
    assert first.state()["place"] == 2
    loader.fails = False
    assert values(source.open_source(loader, 2, True, 0).epoch(0, 2, first.state()), 9) == [[2, 2], [3, 3]]


class Dataset:
    """What is asked of a Hugging Face IterableDataset; its name alone says whose it is."""

    __module__ = "datasets.iterable_dataset"

    def __init__(self, function):
        self._ex_iterable = type("MappedExamplesIterable", (), {"function": staticmethod(function)})()
        self.loads = 0

    def __iter__(self):
        return iter([np.full(2, place) for place in range(4)])

    def state_dict(self):
        return {"without": "what lies in a shuffle buffer"}

    def load_state_dict(self, state):
        self.loads += 1


def _batch_fn(unbatched):
    return unbatched


_batch_fn.__module__ = Dataset.__module__


def test_a_hugging_face_stream_is_read_and_dropped_because_its_state_leaves_out_a_shuffle_buffer():
    data = Dataset(_batch_fn)
    found = source.open_source(data, 2, True, 0)
    assert found.resumes == "by reading and dropping"
    assert found.state() is None
    assert values(found.epoch(1, 2, found.state()), 9) == [[2, 2], [3, 3]]
    assert data.loads == 0


def test_a_hugging_face_stream_of_examples_is_refused():
    with pytest.raises(BatchError, match=r"Use fit\(dataset\.batch\(32\)\), or lockstep\.data\.stream\(dataset\)\.bat"):
        source.open_source(Dataset(lambda example: example), 2, True, 0)


def test_a_folder_called_datasets_is_not_hugging_face(monkeypatch):
    monkeypatch.setattr(Counting, "__module__", "datasets.images")
    assert source.open_source(Counting(), 2, True, 0).resumes == "by its state_dict"


def test_a_loaders_state_at_the_end_of_an_epoch():
    first = source.open_source(Counting(), 2, True, 0)
    before = values(first.epoch(0), 9)
    state = first.state()
    after = values(first.epoch(1), 9)
    assert before != after
    assert values(source.open_source(Counting(), 2, True, 0).epoch(1, 0, state), 9) == after


class Foreign:
    """An array of a framework that is no backend's."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        return self.array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, where):
        return Foreign(self.array[where])


class Loaded(Loader):
    def __iter__(self):
        return iter([[Foreign(np.zeros(2)), {"y": Foreign(np.ones(2))}]])


@pytest.mark.parametrize("data", [list(Loaded()), Loaded()], ids=["iterable", "loader with a state"])
def test_arrays_of_other_frameworks_become_numpy(data):
    (batch,) = source.open_source(data, 2, False, 0).epoch(0)
    assert [type(each) for each in leaves(batch)] == [np.ndarray, np.ndarray]
    np.testing.assert_equal(batch, (np.zeros(2), {"y": np.ones(2)}))


class Marked(torch.Tensor):
    """A subclass of the script's own."""


def test_arrays_of_backends_are_not_converted():
    given = np.zeros(2), torch.zeros(2), torch.zeros(2).as_subclass(Marked), [1, 2], "text"
    (batch,) = source.open_source([given], 2, False, 0).epoch(0)
    assert all(one is other for one, other in zip(batch, given, strict=True))


class Table:
    """A data set as Hugging Face has them: it can be iterated, asked for several, and has a shape."""

    shape = (6, 2)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"x": np.full(2, index), "y": index}

    def __getitems__(self, indices):
        return [self[index] for index in indices]

    def __iter__(self):
        return (self[index] for index in range(6))


def test_a_data_set_that_can_be_iterated_too():
    found = source.open_source(Table(), 4, False, 0)
    (batch,) = Readers().read([next(found.epoch(0))])
    assert batch["y"].tolist() == [0, 1, 2, 3]
    assert source.open_source(indexed(Table()).shuffle(1), 4, False, 0).num_steps == 2


def test_read_batches_reads_as_many_epochs_as_needed():
    found = source.read_batches(SOURCES["pipeline"](), 6)
    assert [(rows.epoch, rows.batch) for rows in found] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


@pytest.mark.parametrize("has_state", [False, True])
def test_opening_a_loader_opens_one_iterator(has_state):
    """A loader that shuffles draws a number for each, so another one would change the order of the epochs."""

    class Loader:
        opened = 0

        def __iter__(self):
            self.opened += 1
            return Batches() if has_state else iter([np.zeros(2)])

    class Batches:
        get_state = set_state = __next__ = None

        def __iter__(self):
            return self

    loader = Loader()
    source = open_loader(loader, seed=0)
    assert not source.once
    assert loader.opened == 1
