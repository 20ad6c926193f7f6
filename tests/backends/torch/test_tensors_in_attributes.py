"""Tensors in attributes: refused if the next pass reads them, allowed if it does not."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ExactError

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)) + 1
Y = torch.arange(24) % 3


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.prepare()

    def prepare(self):
        pass


class Replaced(Base):
    def prepare(self):
        self.mean = torch.zeros(5)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x - self.mean)


class InPlace(Base):
    def prepare(self):
        self.mean = torch.zeros(5)

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layer(x - self.mean)


class SeenInEvaluation(Base):
    """A batch norm as in a textbook: no training pass reads it."""

    def prepare(self):
        self.mean = torch.zeros(5)

    def forward(self, x):
        if not self.training:
            return self.layer(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x - x.mean(0))


class Begun(Base):
    """Has no value before the first pass."""

    def prepare(self):
        self.mean = None

    def forward(self, x):
        self.mean = x.mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x - self.mean)


class Largest(Base):
    """Computing one shard twice would not show it."""

    def prepare(self):
        self.most = torch.zeros(5)

    def forward(self, x):
        self.most = torch.maximum(self.most, x.max(0).values)
        return self.layer(x / self.most)


class InDict(Base):
    def prepare(self):
        self.stats = {"mean": torch.zeros(5)}

    def forward(self, x):
        self.stats["mean"] = 0.9 * self.stats["mean"] + 0.1 * x.mean(0)
        return self.layer(x - self.stats["mean"])


class InList(Base):
    """A memory that grows."""

    def prepare(self):
        self.memory = []

    def forward(self, x):
        mean = torch.stack(self.memory).mean(0) if self.memory else 0
        self.memory.append(x.mean(0))
        return self.layer(x - mean)


class InTuple(Base):
    def prepare(self):
        self.stats = (torch.zeros(5), 1)

    def forward(self, x):
        self.stats = (0.9 * self.stats[0] + 0.1 * x.mean(0), 1)
        return self.layer(x - self.stats[0])


class InSet(Base):
    def prepare(self):
        self.seen = set()

    def forward(self, x):
        total = sum(each.item() for each in self.seen)
        self.seen.add(x.mean())
        return self.layer(x - total)


class Box:
    pass


class InObject(Base):
    def prepare(self):
        self.box = Box()
        self.box.mean = torch.zeros(5)

    def forward(self, x):
        self.box.mean = 0.9 * self.box.mean + 0.1 * x.mean(0)
        return self.layer(x - self.box.mean)


class Buffered(Base):
    """The way out."""

    def prepare(self):
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x - self.mean)


class Recorded(Base):
    """Leaves what it has computed, for the script or for the loss."""

    def prepare(self):
        self.inputs = []

    def forward(self, x):
        self.map = torch.softmax(x, 1)
        self.inputs.append(x)
        self.outputs = self.layer(self.map * x)
        return self.outputs


class Cached(Base):
    """Builds tables of the inputs' length, once, and a larger one for more."""

    def prepare(self):
        self.table, self.tables = None, {}

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(5.0 * len(x)).reshape(-1, 5).cos()
        if x.shape not in self.tables:
            self.tables[x.shape] = torch.arange(5.0 * len(x)).reshape(x.shape).sin()
        return self.layer(x * self.table[: len(x)] + self.tables[x.shape])


class InTupleCached(Base):
    """A table in a tuple that grows with the inputs' length."""

    def prepare(self):
        self.tables = ()

    def forward(self, x):
        if not self.tables or len(self.tables[0]) < len(x):
            angles = torch.arange(5.0 * len(x)).reshape(-1, 5)
            self.tables = angles.cos(), angles.sin()
        return self.layer(x * self.tables[0][: len(x)] + self.tables[1][: len(x)])


class Scratch(Base):
    """Writes to a tensor of its own before it reads it."""

    def prepare(self):
        self.scratch = torch.zeros(24, 5)

    def forward(self, x):
        self.scratch.zero_()
        self.scratch[: len(x)] = 2 * x
        return self.layer(self.scratch[: len(x)].clone())


def normalized():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 8)), nn.utils.spectral_norm(nn.Linear(8, 3)))


def wrapped(make, devices=1, shards=4, loss=None, **options):
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = loss or nn.CrossEntropyLoss()
    return lockstep.wrap(net, optimizer, loss, devices=devices, shards=shards, threads=1, **options)


STATEFUL = [
    (Replaced, "'mean' of Replaced"),
    (InPlace, "'mean' of InPlace"),
    (SeenInEvaluation, "'mean' of SeenInEvaluation"),
    (Begun, "'mean' of Begun"),
    (Largest, "'most' of Largest"),
    (InDict, "'mean' of 'stats' of InDict"),
    (InList, "'memory' of InList"),
    (InTuple, "'stats' of InTuple"),
    (InSet, "'seen' of InSet"),
    (InObject, "'mean' of 'box' of InObject"),
]


@pytest.mark.parametrize(("make", "where"), STATEFUL)
def test_a_tensor_kept_for_the_next_forward_pass_is_refused(make, where):
    with wrapped(make) as trainer:
        before = trainer.digest()
        with pytest.raises(ExactError) as caught:
            trainer.step((X, Y))
        assert str(caught.value) == (
            f"A forward pass reads what an earlier pass has left in {where}: with another value there, a shard's "
            "results have changed. Such a value is neither sent to other processes nor saved, so results would depend "
            "on the number of devices. Make it a buffer: "
            "self.register_buffer(name, tensor); or use lockstep.wrap(..., exact=False)."
        )
        assert trainer.digest() == before


@pytest.mark.parametrize(("make", "devices"), [(Replaced, 1), (InPlace, 1), (InDict, 1), (Replaced, 2)])
def test_it_is_refused_at_the_second_step_if_a_process_has_one_shard(make, devices):
    with wrapped(make, devices, shards=devices) as trainer:
        assert len(trainer.devices) == devices
        trainer.step((X, Y))
        with pytest.raises(ExactError, match="reads what an earlier pass has left in"):
            trainer.step((X, Y))


def test_a_buffer_instead_gives_the_same_digest_on_1_and_2_devices():
    found = set()
    for devices in (1, 2):
        with wrapped(Buffered, devices) as trainer:
            assert len(trainer.devices) == devices
            for _ in range(3):
                trainer.step((X, Y))
            found.add(trainer.digest())
    assert len(found) == 1


def test_such_a_model_trains_if_not_exact():
    trainer = wrapped(Replaced, exact=False)
    for _ in range(3):
        trainer.step((X, Y))


class Summed(nn.Module):
    """Several models at once, because every wrapped one starts a worker of its own."""

    def __init__(self, *makes):
        super().__init__()
        self.models = nn.ModuleList(make() for make in makes)

    def forward(self, x):
        return sum(model(x) for model in self.models)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of weight_norm
def test_a_tensor_left_in_an_attribute_is_allowed():
    found = set()
    for devices in (1, 2):
        with wrapped(lambda: Summed(Recorded, Cached, Scratch, normalized), devices) as trainer:
            assert len(trainer.devices) == devices
            for size in (12, 24, 24, 20):
                trainer.step((X[:size], Y[:size]))
                trainer.evaluate((X, Y))
                trainer.predict(X)
            found.add(trainer.digest())
    assert len(found) == 1


def test_a_table_that_was_built_for_longer_inputs_serves_shorter_ones():
    found = set()
    for devices in (1, 2):
        with wrapped(lambda: Summed(Cached, InTupleCached), devices) as trainer:
            assert len(trainer.devices) == devices
            for size in (12, 20, 12, 24, 8, 16, 12, 8):
                trainer.step((X[:size], Y[:size]))
            found.add(trainer.digest())
    assert len(found) == 1


class Growing(Base):
    """The newest inputs before all others, read in evaluation alone."""

    def prepare(self):
        self.inputs = None

    def forward(self, x):
        if self.training:
            self.inputs = x if self.inputs is None else torch.cat([x, self.inputs])
        return self.layer(x if self.training else x - self.inputs.mean(0))


def test_a_tensor_that_accumulates_inputs_is_refused():
    trainer = wrapped(Growing)
    with pytest.raises(ExactError, match="'inputs' of Growing"):
        trainer.step((X, Y))


class Penalized(Base):
    """Leaves a term of the loss, which is a number at first."""

    def prepare(self):
        self.penalty = 0.0

    def forward(self, x):
        outputs = self.layer(x)
        self.penalty = outputs.square().mean()
        return outputs


@lockstep.objective
def penalized(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1]) + 0.1 * model.penalty


def test_a_tensor_may_take_the_place_of_a_number(tmp_path):
    found = set()
    for devices in (1, 2):
        with wrapped(Penalized, devices, loss=penalized) as trainer:
            assert len(trainer.devices) == devices
            trainer.save(tmp_path / str(devices))
            for _ in range(3):
                trainer.step((X, Y))
            trainer.evaluate((X, Y))
            found.add(trainer.digest())
            trainer.restore(tmp_path / str(devices))
            assert trainer.model.penalty == 0.0
            for _ in range(3):
                trainer.step((X, Y))
            found.add(trainer.digest())
    assert len(found) == 1


def test_a_tensor_that_counts_in_the_place_of_a_number_is_refused():
    class Counting(Base):
        def prepare(self):
            self.total = 0.0

        def forward(self, x):
            self.total = self.total + x.mean().detach()
            return self.layer(x)

    trainer = wrapped(Counting)
    with pytest.raises(ExactError, match="'total' of Counting"):
        trainer.step((X, Y))


def test_the_script_may_change_such_tensors_between_steps():
    class Scaled(Base):
        def prepare(self):
            self.scale = torch.ones(5)

        def forward(self, x):
            self.seen = x * self.scale
            return self.layer(self.seen)

    found = set()
    for devices in (1, 2):
        with wrapped(Scaled, devices) as trainer:
            for step in range(3):
                trainer.model.scale = torch.full((5,), 1.0 + step)
                trainer.step((X, Y))
                trainer.model.scale.mul_(0.5)
                trainer.step((X, Y))
            found.add(trainer.digest())
    assert len(found) == 1


def test_an_attribute_that_is_read_only_later_is_refused():
    class Late(Replaced):
        def forward(self, x):
            return super().forward(x) if self.warm else self.layer(x)

    Late.warm = False
    trainer = wrapped(Late)
    for _ in range(5):
        trainer.step((X, Y))
    Late.warm = True
    trainer.step((X, Y))
    with pytest.raises(ExactError, match="'mean' of Late"):
        trainer.step((X, Y))


def test_a_tensor_kept_by_evaluation_is_refused():
    trainer = wrapped(Replaced)
    with pytest.raises(ExactError, match="'mean' of Replaced"):
        trainer.predict(X)


class Remembering:
    """A loss with a tensor of its own."""

    def __init__(self):
        self.mean = torch.zeros(())

    def __call__(self, outputs, targets):
        value = nn.functional.cross_entropy(outputs, targets)
        self.mean = 0.9 * self.mean + 0.1 * value.detach()
        return value * self.mean


def test_attributes_of_a_loss_object_are_checked():
    trainer = wrapped(Scratch, loss=Remembering())
    with pytest.raises(ExactError, match="'mean' of the loss, Remembering"):
        trainer.step((X, Y))


def test_a_shard_is_computed_twice_only_if_tensors_are_left():
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    trainer = wrapped(lambda: Counted(5, 3))
    trainer.step((X, Y))
    trainer.step((X, Y))
    assert len(calls) == 8
