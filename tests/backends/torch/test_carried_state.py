"""State from one batch to the next on PyTorch: workers that end, mixed precision, state in attributes."""

import os
import signal

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ExactError, StateError

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(24, 6, generator=GENERATOR), torch.randn(24, 8, generator=GENERATOR)


class Cell(nn.Module):
    """A recurrent cell that may also keep what it must not: a sum over all passes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.total = None

    def forward(self, x, hidden):
        return torch.tanh(self.linear(x) + hidden)


@lockstep.objective
def recur(cell, batch):
    hidden = cell(batch["x"], batch["hidden"])
    return lockstep.Carried(nn.functional.mse_loss(hidden, batch["y"]), hidden)


def wrap(loss=recur, devices=1, **options):
    torch.manual_seed(5)
    cell = Cell()
    sgd = torch.optim.SGD(cell.parameters(), 0.1)
    return lockstep.wrap(cell, sgd, loss, devices=devices, shards=4, threads=1, seed=0, **options)


def run(trainer, num_steps=3):
    hidden = torch.zeros(24, 8)
    for _ in range(num_steps):
        hidden = trainer.step({"x": X, "y": Y, "hidden": hidden}, verbose=0).carried
    return hidden


def test_state_that_is_lost_with_a_worker_is_said(monkeypatch):
    with wrap(devices=2) as trainer:
        run(trainer, 1)
        session = trainer.session
        step = session.step

        def step_and_kill(batch):
            outcome = step(batch)
            for pid in session.processes.pids:
                os.kill(pid, signal.SIGKILL)
            return outcome

        monkeypatch.setattr(session, "step", step_and_kill)
        logs = trainer.step({"x": X, "y": Y, "hidden": torch.zeros(24, 8)}, verbose=0)
        monkeypatch.undo()
        assert logs["loss"] > 0
        with pytest.raises(StateError, match=r"carried state of this step lacks shard 2, 3: a worker ended"):
            _ = logs.carried
        assert run(trainer, 1).shape == (24, 8)


def test_state_in_bfloat16_comes_back_as_float32():
    found = []
    for devices in (1, 2):
        with wrap(devices=devices, precision="bf16") as trainer:
            hidden = run(trainer)
            found.append((hidden.dtype, hidden.numpy().tobytes(), trainer.digest()))
    assert found[0] == found[1]
    assert found[0][0] == torch.float32


def test_the_state_has_no_graph_and_is_the_scripts_own():
    with wrap() as trainer:
        logs = trainer.step({"x": X, "y": Y, "hidden": torch.zeros(24, 8)}, verbose=0)
        assert not logs.carried.requires_grad
        logs.carried.zero_()
        assert logs.carried.abs().sum() > 0


@lockstep.objective
def remember(cell, batch):
    """The loss does not depend on the attribute, the state does."""
    hidden = cell(batch["x"], batch["hidden"])
    before = torch.zeros(8) if cell.total is None else cell.total
    cell.total = before + hidden.detach().sum(0)
    return lockstep.Carried(nn.functional.mse_loss(hidden, batch["y"]), hidden + before)


def test_state_that_depends_on_an_attribute_of_the_shard_before_is_refused():
    with wrap(remember) as trainer, pytest.raises(ExactError, match="total"):
        run(trainer)


def test_an_evaluation_carries_state_through_the_models_outputs():
    class Outputs(Cell):
        def forward(self, x, hidden):
            after = super().forward(x, hidden)
            return after * 2, after

    model = Outputs()
    with lockstep.wrap(model, torch.optim.SGD(model.parameters(), 0.1), recur, devices=2, shards=4) as trainer:
        hidden = expected = torch.zeros(24, 8)
        for _ in range(2):
            doubled, hidden = trainer((X, hidden))
            expected = torch.cat([model(*rows)[1].detach() for rows in zip(X.split(6), expected.split(6), strict=True)])
            assert torch.equal(hidden, expected)
            assert torch.equal(doubled, 2 * hidden)
