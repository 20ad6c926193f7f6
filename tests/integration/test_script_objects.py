"""The script's own objects stay true: what it changes between two steps reaches every replica before the second.

The same story is told on one replica and on three. After each of its changes comes
a step, and the digests must be one; `digests` also compares the replicas with each
other.
"""

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from integration import scripted

torch.manual_seed(6)
BATCH = torch.randn(33, 13), torch.randint(5, (33,))
OTHER = torch.randn(20, 13), torch.randint(5, (20,))


class Story:
    """A trainer, the script's own objects, and what the script does with them."""

    def __init__(self, devices):
        self.trainer, self.net, self.optimizer = scripted.start(devices)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.saved = {}

    def nothing(self):
        pass

    def learning_rate_by_hand(self):
        self.optimizer.param_groups[0]["lr"] = 0.02

    def another_number_of_the_group(self):
        self.optimizer.param_groups[0]["betas"] = (0.8, 0.99)

    def scheduler_step(self):
        self.scheduler.step()
        assert self.optimizer.param_groups[0]["lr"] < 0.02

    def frozen_layer(self):
        self.net.first.requires_grad_(False)

    def unfrozen_layer(self):
        self.net.first.requires_grad_(True)

    def new_parameter_group(self):
        self.optimizer.add_param_group({"params": self.net.head.parameters(), "lr": 0.05, "weight_decay": 0.0})

    def saved_states(self):
        self.saved = copy.deepcopy({"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()})

    def weight_in_place(self):
        with torch.no_grad():
            self.net.second.weight.mul_(0.5)
            self.net.second.bias[3] = -1.0

    def buffer_in_place(self):
        self.net.norm.running_mean.fill_(0.25)

    def forward_in_training_mode(self):
        before = self.net.norm.running_mean.clone()
        self.net.train()
        self.net(OTHER[0])
        assert not torch.equal(before, self.net.norm.running_mean)

    def load_state_dict_of_the_model(self):
        self.net.load_state_dict(self.saved["net"])

    def load_state_dict_of_the_optimizer(self):
        self.optimizer.load_state_dict(self.saved["optimizer"])

    def optimizer_slot_in_place(self):
        self.optimizer.state[self.net.first.weight]["exp_avg"].zero_()

    def optimizer_state_cleared(self):
        self.optimizer.state.clear()

    def layer_in_evaluation_mode(self):
        self.net.norm.eval()

    def layer_in_training_mode(self):
        self.net.norm.train()

    def model_in_evaluation_mode(self):
        self.net.eval()  # a script that has evaluated by itself and goes on training

    def new_data(self):
        self.net.second.weight.data = torch.full_like(self.net.second.weight, 0.125)

    def new_data_twice(self):
        """The second lands where the first's predecessor was."""
        self.net.head.weight.data = torch.full_like(self.net.head.weight, 0.5)
        self.net.head.weight.data = torch.eye(5, 16)

    def matmul_precision(self):
        torch.set_float32_matmul_precision("medium")

    def evaluation_between(self):
        assert set(self.trainer.evaluate(OTHER)) == {"loss"}
        assert self.trainer.predict(OTHER[0]).shape == (20, 5)

    def a_batch_of_another_size(self):
        self.trainer.step(OTHER)

    def copies(self):
        """Saving, copying and calling the model work at any time, and see the newest weights."""
        file = io.BytesIO()
        torch.save(self.net.state_dict(), file)
        file.seek(0)
        names = [f"{layer}.{part}" for layer in ("first", "second", "head") for part in ("weight", "bias")]
        loaded = torch.load(file)
        assert set(names) <= set(loaded)
        assert {name.partition(".")[0] for name in loaded} == {"first", "norm", "second", "head"}
        twin = copy.deepcopy(self.net).eval()
        fresh = scripted.Net()
        fresh.load_state_dict(loaded)
        outputs = self.trainer(OTHER[0])
        assert torch.equal(fresh.eval()(OTHER[0]), twin(OTHER[0]))
        assert outputs.shape == twin(OTHER[0]).shape
        assert self.trainer.model is self.net

    def data_in_place(self):
        """Version counters do not count what is written through `.data`."""
        self._begin_again()
        self.net.second.weight.data.clamp_(-0.05, 0.05)

    def data_through_numpy(self):
        self._begin_again()
        self.net.head.bias.detach().numpy()[...] = np.arange(5)

    def _begin_again(self):
        self.net.load_state_dict(self.saved["net"])
        self.optimizer.load_state_dict(self.saved["optimizer"])
        self.trainer.step(OTHER)


CHANGES: list[Callable[[Story], None]] = [
    value for name, value in vars(Story).items() if callable(value) and not name.startswith("_")
]


def told(devices):
    """The whole story: after each change a step, its loss and every digest."""
    story = Story(devices)
    with story.trainer:
        assert len(story.trainer.devices) == devices
        chapters = {}
        for change in CHANGES:
            change(story)
            loss = story.trainer.step(BATCH)["loss"]
            own = {name: value.clone() for name, value in story.net.state_dict().items()}
            try:
                digests = story.trainer.digests()
            except Exception as error:  # replicas that differ: told below, and brought together for the next chapter
                digests = {"error": str(error)}
                story.trainer.close()
            chapters[change.__name__] = {"loss": loss.hex(), **digests}
            assert all(torch.equal(own[name], value) for name, value in story.net.state_dict().items())
    story.copies()  # afterwards too, which starts the replicas again
    story.trainer.close()
    return chapters


@pytest.fixture(scope="module")
def stories():
    precision = torch.get_float32_matmul_precision()
    try:
        one = told(1)
        torch.set_float32_matmul_precision(precision)
        return one, told(3)
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("change", [change.__name__ for change in CHANGES])
def test_a_change_between_steps_reaches_every_replica(change, stories):
    one, three = stories
    assert three[change] == one[change]


def test_the_changes_are_seen_at_all(stories):
    """No two chapters end alike, so every step was made."""
    one, _ = stories
    assert len({chapter["model.first.weight"] for chapter in one.values()}) >= len(CHANGES) - 1  # one is frozen


@pytest.mark.parametrize("devices", [1, 2])
def test_a_group_with_a_parameter_of_another_model(devices):
    trainer, _, optimizer = scripted.start(devices)
    with trainer:
        trainer.step(BATCH)
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
        with pytest.raises(ValueError, match="parameters that the model had when it was wrapped"):
            trainer.step(BATCH)
