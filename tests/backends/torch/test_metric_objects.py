"""Metric objects that are torch modules, as torchmetrics' are: they stay in one process and on the CPU."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ModelError
from metric_object_samples import Order, auroc


class Gathering(nn.Module):
    """A metric that would gather in a launched world."""

    def __init__(self):
        super().__init__()
        self.sync_on_compute = self._to_sync = True
        self.inner = nn.ModuleList([nn.Linear(1, 1)])
        self.inner[0].sync_on_compute = self.inner[0]._to_sync = True
        self.rows = []

    def update(self, outputs, targets):
        assert outputs.device.type == targets.device.type == "cpu"
        assert not outputs.requires_grad
        self.rows.append((outputs, targets))

    def compute(self):
        for each in (self, self.inner[0]):
            assert (each.sync_on_compute, each._to_sync) == (False, False)
        outputs, targets = (torch.cat(each) for each in zip(*self.rows, strict=True))
        scores = (outputs[:, 1] - outputs[:, 0]).double().numpy()
        return torch.tensor(auroc(scores, targets.numpy()))

    def reset(self):
        self.rows = []


def wrapped(metrics, dtype=torch.float32, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.3)).to(dtype)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    return lockstep.wrap(net, sgd, nn.CrossEntropyLoss(), metrics=metrics, devices=1, shards=2, **options)


GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 4, generator=GENERATOR), torch.randint(0, 2, (40,), generator=GENERATOR)


def test_a_metric_module_gets_cpu_tensors_and_does_not_gather():
    mine = Gathering()
    trainer = wrapped(mine)
    found = trainer.evaluate((X, Y), batch_size=16)["Gathering"]
    rows = trainer.predict(X)
    assert abs(found - auroc(rows[:, 1] - rows[:, 0], Y.numpy())) < 1e-6
    assert mine.sync_on_compute  # the script's own stays as it is
    assert mine.rows == []


def test_metrics_get_bfloat16_outputs_as_float32():
    seen = []

    class Kinds(Order):
        def update(self, outputs, targets):
            seen.append((outputs.dtype, targets.dtype))
            super().update(outputs, targets)

    Kinds.__deepcopy__ = lambda self, memo: self
    wrapped([Kinds()], torch.bfloat16).step((X.bfloat16(), Y))["Kinds"]
    assert seen == [(torch.float32, torch.int64)]


def test_metric_objects_with_an_objective_are_refused():
    @lockstep.objective
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    net = nn.Linear(4, 2)
    trainer = lockstep.wrap(net, torch.optim.SGD(net.parameters(), 0.1), loss, metrics=[Order()], devices=1, shards=2)
    before = trainer.digest()
    with pytest.raises(ModelError, match=r"this loss is an objective of .model, batch., which has neither"):
        trainer.step((X, Y))
    assert trainer.digest() == before
    assert trainer.num_steps == 0
