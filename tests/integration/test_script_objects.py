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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lockstep
from integration import changing_model
from lockstep.errors import ModelError, OptimizerError

torch.manual_seed(6)
BATCH = torch.randn(33, 13), torch.randint(5, (33,))
OTHER = torch.randn(20, 13), torch.randint(5, (20,))


class Story:
    """A trainer, the script's own objects, and what the script does with them."""

    def __init__(self, devices):
        self.trainer, self.net, self.optimizer, self.loss = changing_model.start(devices)
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

    def dropout(self):
        self.net.dropout.p = 0.6

    def class_weights_in_place(self):
        self.loss.weight[0] = 5.0

    def denormals_flushed(self):
        """With a rate of 1e-39 an update of 0 is a denormal, or 0 where these are flushed."""
        torch.set_flush_denormal(True)
        self.optimizer.param_groups[0]["lr"] = self.optimizer.param_groups[1]["lr"] = 1e-39
        with torch.no_grad():
            self.net.head.bias.zero_()

    def denormals_kept(self):
        torch.set_flush_denormal(False)
        self.optimizer.param_groups[0]["lr"] = self.optimizer.param_groups[1]["lr"] = 0.01

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
        fresh = changing_model.Net()
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
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("change", [change.__name__ for change in CHANGES])
def test_a_change_between_steps_reaches_every_replica(change, stories):
    one, three = stories
    assert three[change] == one[change]


def test_the_changes_are_seen_at_all(stories):
    """No two chapters end alike, so every step was made."""
    one, _ = stories
    unseen = 2  # once it is frozen, and once the rate is next to nothing
    assert len({chapter["model.first.weight"] for chapter in one.values()}) >= len(CHANGES) - unseen


@pytest.mark.parametrize("devices", [1, 2])
def test_a_group_with_a_parameter_of_another_model(devices):
    trainer, _, optimizer, _ = changing_model.start(devices)
    with trainer:
        trainer.step(BATCH)
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
        with pytest.raises(ValueError, match="parameters did not belong to the model when it was wrapped"):
            trainer.step(BATCH)


def test_what_the_script_puts_in_the_losss_place_reaches_every_replica():
    """Apart from the story, whose later chapters it would change too."""
    found = []
    for devices in (1, 2):
        trainer, _, _, loss = changing_model.start(devices)
        with trainer:
            assert len(trainer.devices) == devices
            trainer.step(BATCH)
            for name, value in (("weight", torch.arange(1.0, 6.0)), ("label_smoothing", 0.2)):
                setattr(loss, name, value)
                found.append((name, trainer.step(BATCH)["loss"], trainer.digest()))
    assert found[:2] == found[2:]


@pytest.fixture(scope="module")
def nesterov():
    """The same trainer on one device and on two; its optimizer writes to the gradients it is given."""
    trainers = []
    for devices in (1, 2):
        torch.manual_seed(5)
        net = changing_model.Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
        trainers.append(lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=6))
    assert [len(trainer.devices) for trainer in trainers] == [1, 2]
    for trainer in trainers:  # opens what stays open between the tests
        trainer.step(BATCH)
        with torch.no_grad():
            trainer.model.first.weight[0] *= 2
        trainer.step(BATCH)
    yield trainers
    for trainer in trainers:
        trainer.close()


def stepped(trainers):
    """The digests after one more step of each."""
    for trainer in trainers:
        trainer.step(BATCH)
    return {trainer.digest() for trainer in trainers}


def test_an_optimizer_that_writes_to_its_gradients(nesterov):
    for _ in range(3):
        assert len(stepped(nesterov)) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_step_hooks_do_not_travel(nesterov, kind):
    _, two = nesterov
    two.step(BATCH)
    nesterov[0].step(BATCH)
    hook = getattr(two.session.backend._recipe.optimizer, f"register_step_{kind}_hook")(lambda *arguments: None)
    try:
        with pytest.raises(OptimizerError, match=r"^The optimizer has step hooks, which are not sent to the workers\."):
            two.step(BATCH)
    finally:
        hook.remove()
    assert len(stepped(nesterov)) == 1


@pytest.mark.parametrize("change", ["assign", "double", "one"])
def test_parameters_that_were_replaced(nesterov, change):
    for trainer in nesterov:
        net, step = trainer.model, trainer.session.run.step
        weight = net.first.weight
        own = dict(net.named_parameters())
        if change == "assign":
            net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()}, assign=True)
        elif change == "double":
            net.double()
        else:
            net.first.weight = nn.Parameter(weight.detach().clone())
        with pytest.raises(ModelError, match=r"^A module or parameter of the model was replaced"):
            trainer.step((BATCH[0].double(), BATCH[1]) if change == "double" else BATCH)
        assert trainer.session.run.step == step
        net.float()
        for name, parameter in own.items():
            path, _, key = name.rpartition(".")
            setattr(net.get_submodule(path), key, parameter)
        assert net.first.weight is weight
    assert len(stepped(nesterov)) == 1


VALUES = {"a": 1.0, "b": 2.0}


@lockstep.objective
def naming(net, batch):
    """Names its values by what the first example of the shard says."""
    x, names = batch
    return net(x).square().mean(), {name: VALUES[name] for name in names[0]}


def refuse(trainer, first, then, size):
    """A batch whose first shards name other values than the rest."""
    with pytest.raises(ModelError, match=r"^An objective must return the same metrics for every shard\."):
        trainer.step((BATCH[0][:8], [first] * size + [then] * (8 - size)))


@pytest.mark.parametrize(
    "devices, first, then",
    [(1, "", "a"), (1, "a", "b"), (2, "a", "b")],  # on two devices each process by itself sees one name
)
def test_an_objective_with_other_names_in_some_shard(devices, first, then):
    torch.manual_seed(5)
    net = nn.Linear(13, 2)
    with lockstep.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1), naming, devices=devices, shards=4) as trainer:
        assert len(trainer.devices) == devices
        refuse(trainer, first, then, 4)  # in the first step
        logs = trainer.step((BATCH[0][:8], ["ab"] * 4 + ["ba"] * 4))  # that was not made, and has fixed no names
        assert dict(logs).items() >= VALUES.items()
        for one, other in (("a", "b"), ("ab", "a"), ("ab", ""), ("a", "ab")):
            for size in (2, 4):  # another shard, another process
                refuse(trainer, one, other, size)
        trainer.step((BATCH[0][:8], ["ab"] * 8))
        assert trainer.session.run.step == 2


def test_an_objective_may_tell_other_things_in_an_evaluation():
    @lockstep.objective
    def telling(net, x):
        return net(x).square().mean(), {"train" if net.training else "test": 1.0}

    net = nn.Linear(13, 2)
    with lockstep.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1), telling, devices=1, shards=4) as trainer:
        for _ in range(2):
            assert set(trainer.step(BATCH[0])) == {"loss", "train"}
            assert set(trainer.evaluate(BATCH[0])) == {"loss", "test"}


class Failing(torch.optim.SGD):
    """Raises where it is told to; what it is told does not travel."""

    def step(self, closure=None):
        if globals().get("FAILS"):
            raise ZeroDivisionError
        return super().step(closure)


@pytest.mark.parametrize("devices", [1, 2])
def test_an_update_that_fails_in_the_scripts_process_alone(devices, monkeypatch):
    """The workers have made the step then, and the script's process has not: its state is the one that counts."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 5))  # no buffers, whose counters a step moves
    trainer = lockstep.wrap(net, Failing(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), devices=devices, shards=4)
    with trainer:
        assert len(trainer.devices) == devices
        trainer.step(BATCH)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        monkeypatch.setitem(globals(), "FAILS", True)
        with pytest.raises(ZeroDivisionError):
            trainer.step(OTHER)
        monkeypatch.delitem(globals(), "FAILS")
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        assert trainer.num_steps == 1
        trainer.digest()  # raises where replicas differ
        trainer.step(BATCH)
        trainer.digest()


def linear():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 5))


def wrapped(net, optimizer, devices=2, loss=None):
    return lockstep.wrap(net, optimizer, loss or nn.CrossEntropyLoss(), devices=devices, shards=4, threads=1)


def parameter_hook(net, optimizer):
    return net[0].weight.register_hook(lambda gradient: gradient * 2)


def accumulated_hook(net, optimizer):
    return net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


def every_optimizers_pre_hook(net, optimizer):
    return register_optimizer_step_pre_hook(lambda *arguments: None)


def every_optimizers_post_hook(net, optimizer):
    return register_optimizer_step_post_hook(lambda *arguments: None)


def every_modules_hook(net, optimizer):
    return nn.modules.module.register_module_forward_hook(lambda *arguments: None)


class StepAgain:
    """A step that was put in the place of the optimizer's own, and can be removed as a hook can."""

    def __init__(self, net, optimizer):
        self.optimizer, own = optimizer, optimizer.step
        optimizer.step = lambda: own()

    def remove(self):
        del self.optimizer.step


HOOKS = {
    parameter_hook: "A parameter has hooks, which are not sent to the workers. "
    "Do their work on gradients = trainer.gradients(batch) before trainer.apply(gradients), or use devices=1.",
    accumulated_hook: "A parameter has hooks, which are not sent to the workers. "
    "Do their work on gradients = trainer.gradients(batch) before trainer.apply(gradients), or use devices=1.",
    every_optimizers_pre_hook: "The optimizer has step hooks, which are not sent to the workers. "
    "Do their work between gradients = trainer.gradients(batch) and trainer.apply(gradients), or use devices=1.",
    every_optimizers_post_hook: "The optimizer has step hooks, which are not sent to the workers. "
    "Do their work between gradients = trainer.gradients(batch) and trainer.apply(gradients), or use devices=1.",
    every_modules_hook: "torch.nn.modules.module has hooks for all modules, which are not sent to the workers. "
    "Register them on the model's own modules before lockstep.wrap, or use devices=1.",
    StepAgain: "The optimizer's `step` was replaced, but workers use the `step` of its class. "
    "Define a subclass with this step, or use devices=1.",
}


@pytest.mark.timeout(60)
def test_hooks_and_replaced_steps_are_refused():
    """Neither those that are there at wrap nor those that come between two steps."""
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first = parameter_hook(net, optimizer)
    with wrapped(net, optimizer) as trainer:
        assert len(trainer.devices) == 2
        with pytest.raises(ModelError, match=r"^A parameter has hooks, which are not sent"):
            trainer.step(BATCH)
        first.remove()
        trainer.step(BATCH)
        for hang, message in HOOKS.items():
            hook = hang(net, optimizer)
            try:
                with pytest.raises((ModelError, OptimizerError)) as caught:
                    trainer.step(BATCH)
            finally:
                hook.remove()
            assert str(caught.value) == message
            trainer.step(BATCH)
        trainer.digest()
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the step too, to count its calls
        trainer.step(BATCH)
        trainer.digest()


class Damped(torch.optim.SGD):
    """Keeps numbers of its own, and the parameters, which torch's pickle leaves out."""

    floor = 0.0

    def __init__(self, parameters, lr):
        parameters = list(parameters)
        super().__init__(parameters, lr=lr)
        self.damping = 0.5
        self.calls = 0
        self.held = parameters

    def step(self, closure=None):
        self.calls += 1
        for parameter in self.held:
            parameter.grad.mul_(self.damping / self.calls).add_(self.floor)
        return super().step(closure)


def test_an_optimizers_own_attributes_travel_and_are_saved(tmp_path):
    found = []
    for devices in (1, 2):
        net = linear()
        optimizer = Damped(net.parameters(), lr=0.1)
        optimizer.floor = 0.01  # over the class's own
        with wrapped(net, optimizer, devices) as trainer:
            assert len(trainer.devices) == devices
            trainer.step(BATCH)
            optimizer.damping = 2.0
            trainer.step(BATCH)
            trainer.save(tmp_path / "saved")
            trainer.step(BATCH)
            found.append(trainer.digest())
            trainer.restore(tmp_path / "saved")
            assert optimizer.calls == 2
            trainer.step(BATCH)
            found.append(trainer.digest())
    assert len(set(found)) == 1


class Reduced(Damped):
    """Says itself what travels."""

    def __getstate__(self):
        return {**super().__getstate__(), "damping": 0.5, "calls": 0, "held": self.held}


def test_an_optimizer_that_says_itself_what_travels():
    net = linear()
    with wrapped(net, Reduced(net.parameters(), lr=0.1)) as trainer:
        trainer.step(BATCH)
        trainer.digest()


def test_an_optimizers_attribute_that_cannot_travel():
    net = linear()
    optimizer = Damped(net.parameters(), lr=0.1)
    optimizer.file = io.StringIO
    optimizer.lines = (line for line in "ab")
    with pytest.raises(ModelError, match=r"The optimizer's attribute 'lines' of type generator cannot be pickled"):
        wrapped(net, optimizer)


def another_module(net):
    net[1] = nn.Identity()


def another_order_in_memory(net):
    net[0].weight.data = net[0].weight.data.T.contiguous().T


@pytest.mark.parametrize(
    ("change", "devices"), [(another_module, 1), (another_order_in_memory, 1), (another_module, 2)]
)
def test_a_module_that_was_replaced_and_a_weight_laid_out_otherwise(change, devices):
    net = linear()
    with wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1), devices) as trainer:
        assert len(trainer.devices) == devices
        trainer.step(BATCH)
        change(net)
        with pytest.raises(ModelError, match=r"was replaced, or a parameter has another type or other strides"):
            trainer.step(BATCH)


class Sized(nn.Module):
    """Attributes of every kind; in a pass it keeps what it has seen, as models that are looked into do."""

    def __init__(self):
        super().__init__()
        self.net = linear()
        self.scale = 1.0
        self.scales = [1.0, 1.0]
        self.mask = torch.ones(13)
        self.flag = None
        self.extra = 1.0
        self.outputs = torch.zeros(1)

    def forward(self, x):
        scale = self.scale * self.scales[1] * (2.0 if self.flag else 1.0) * getattr(self, "extra", 3.0)
        outputs = self.net(x * self.mask) * float(scale)
        self.outputs = outputs.detach()
        return outputs


def a_number_of_numpys(net):
    net.scale = np.linspace(0.5, 1.0, 3)[1]


def a_truth_of_numpys(net):
    net.flag = np.bool_(True)


def a_list(net):
    net.scales[1] = 0.25


def a_tuple(net):
    net.scales = (1.0, np.float32(0.75))


def a_tensor_in_place(net):
    net.mask[3] = 0.0


def another_tensor(net):
    net.mask = torch.linspace(0.0, 1.0, 13)


def a_deleted_number(net):
    del net.extra


def the_scripts_own_pass(net):
    net(BATCH[0])


def test_attributes_of_every_kind_reach_every_replica():
    found = []
    changes = [a_number_of_numpys, a_truth_of_numpys, a_list, a_tuple, a_tensor_in_place, another_tensor]
    changes += [a_deleted_number, the_scripts_own_pass]
    for devices in (1, 2):
        torch.manual_seed(5)
        net = Sized()
        with wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1), devices) as trainer:
            assert len(trainer.devices) == devices
            trainer.step(BATCH)
            for change in changes:
                change(net)
                found.append((change.__name__, trainer.step(BATCH)["loss"], trainer.digest()))
            trainer.evaluate(BATCH)
            carried = trainer.session.backend._replica._attributes._carried
            assert devices == 1 or carried == {("", "mask"), ("", "outputs")}
    assert found[: len(changes)] == found[len(changes) :]
    assert len({loss for _, loss, _ in found}) == len(changes)


class Shared(nn.Module):
    """A buffer that is a view of another."""

    def __init__(self):
        super().__init__()
        self.net = linear()
        self.register_buffer("mean", torch.zeros(13))
        self.register_buffer("part", self.mean[:3])


def tied_data():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data = net[0].weight.data
    return net


@pytest.mark.parametrize("make, names", [(tied_data, "'0.weight' and '1.weight'"), (Shared, "'mean' and 'part'")])
def test_tensors_that_share_memory_without_being_one(make, names):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapped(net, optimizer, devices=1)
    with pytest.raises(ModelError) as caught:
        wrapped(net, optimizer)
    assert str(caught.value) == (
        f"{names} are two tensors that share memory. They are sent to the workers separately, so the workers' copies "
        "would not share memory. Use one tensor for both (b.weight = a.weight), replace one by its clone(), or use "
        "devices=1."
    )


def test_tensors_side_by_side_in_one_memory_travel():
    net = nn.Sequential(nn.Linear(13, 5), nn.Linear(5, 5, bias=False))
    room = torch.randn(2, 5)
    net[0].bias.data = room[0]
    net.register_buffer("other", room[1])
    with wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1)) as trainer:
        trainer.step(BATCH)
        trainer.digest()
