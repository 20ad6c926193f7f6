"""Torch's checkpoints: its own names, tied weights once, every optimizer's state, and runs resumed inside an epoch."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import nn

import lockstep
from lockstep.datasets import digits
from lockstep.errors import StateError
from sigterm_at_step import TermAt

(x, y), _ = digits()
x, y = x[:250], y[:250]


class Tied(nn.Module):
    """Two layers with one weight, batch norm, and a buffer that is in no state_dict."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.back = nn.Linear(32, 64)
        self.again = nn.Linear(32, 64)
        self.again.weight = self.back.weight
        self.head = nn.Linear(64, 10)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs)).relu()
        return self.head(self.back(hidden) + self.scale * self.again(hidden))


def plain():
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


def wrapped(model=plain, optimizer=torch.optim.AdamW, devices=1, **options):
    torch.manual_seed(3)
    net = model()
    return lockstep.wrap(net, optimizer(net.parameters(), lr=0.01), nn.CrossEntropyLoss(), devices=devices, **options)


def fit(trainer, epochs=1, **options):
    return trainer.fit((x, y), epochs=epochs, batch_size=64, verbose=0, **options)


def test_load_state_dict_reads_the_saved_model(tmp_path):
    trainer = wrapped()
    fit(trainer)
    trainer.save(tmp_path / "saved")
    fresh = plain()
    fresh.load_state_dict(safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors"))
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)


def test_tied_weights_are_saved_once(tmp_path):
    trainer = wrapped(Tied)
    fit(trainer)
    trainer.save(tmp_path / "saved")
    names = set(safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors"))
    assert names == set(trainer.model.state_dict()) - {"again.weight"}
    fresh = Tied()
    safetensors.torch.load_model(fresh, tmp_path / "saved" / "model.safetensors")
    assert torch.equal(fresh.again.weight, trainer.model.back.weight)
    restored = wrapped(Tied)
    restored.restore(tmp_path / "saved")
    assert restored.digest() == trainer.digest()
    assert restored.model.again.weight is restored.model.back.weight


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
        lambda parameters, lr: torch.optim.Adam(parameters, torch.tensor(lr), amsgrad=True),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        lambda parameters, lr: torch.optim.Adafactor(parameters, lr),
    ],
    ids=["SGD", "Adam", "Adagrad", "RMSprop", "NAdam", "Adafactor"],
)
def test_every_optimizer_resumes_with_the_same_bits(tmp_path, optimizer):
    one = wrapped(optimizer=optimizer)
    fit(one)
    one.save(tmp_path / "saved")
    two = wrapped(optimizer=optimizer)
    two.restore(tmp_path / "saved")
    assert two.digest() == one.digest()
    for trainer in (one, two):
        fit(trainer)
    assert two.digest() == one.digest()


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16"}, {"clip_norm": 0.1}])
def test_options_resume_with_the_same_bits(tmp_path, options):
    one, two = wrapped(**options), wrapped(**options)
    fit(one)
    one.save(tmp_path / "saved")
    two.restore(tmp_path / "saved")
    for trainer in (one, two):
        fit(trainer)
    assert two.digest() == one.digest()


def test_bfloat16_weights_resume_with_the_same_bits(tmp_path):
    def small():
        return plain().bfloat16()

    def step(trainer):
        trainer.step((torch.tensor(x[:64]).bfloat16(), y[:64]))

    one, two = wrapped(small), wrapped(small)
    step(one)
    one.save(tmp_path / "saved")
    assert safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")["0.weight"].dtype == torch.bfloat16
    assert lockstep.load_arrays(tmp_path / "saved")["0.weight"].dtype == "float32"
    two.restore(tmp_path / "saved")
    step(one)
    step(two)
    assert two.digest() == one.digest()


def test_another_optimizer_is_refused(tmp_path):
    one = wrapped()
    fit(one)
    one.save(tmp_path / "saved")
    two = wrapped(optimizer=torch.optim.Adam)
    before = two.digest()
    with pytest.raises(StateError, match=r"saved with torch.optim.adamw.AdamW, and this run has torch.optim.adam.Adam"):
        two.restore(tmp_path / "saved")
    assert two.digest() == before


@pytest.mark.parametrize(("stop_at", "devices"), [(2, 1), (4, 1), (7, 3)])
def test_a_run_resumed_inside_an_epoch_has_the_same_bits(tmp_path, stop_at, devices):
    def run(trainer, folder, *more):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(trainer.session.recipe.optimizer, max_lr=0.05, total_steps=20)
        schedule = lockstep.LearningRateSchedule(scheduler, per="step")
        history = fit(trainer, epochs=2, checkpoint=folder, callbacks=[schedule, lockstep.EMA(0.9), *more])
        return trainer.digest(), history.history, trainer.learning_rates

    options = {"shards": 4, "metrics": ["accuracy"]}
    whole = run(wrapped(**options), tmp_path / "whole")
    with pytest.raises(SystemExit) as leaving:
        run(wrapped(**options), tmp_path / "stopped", TermAt(stop_at))
    assert leaving.value.code == 0
    with wrapped(**options, devices=devices) as trainer:
        assert len(trainer.devices) == devices
        assert run(trainer, tmp_path / "stopped") == whole


def turned(trainer):
    """What a callback may do after some epochs."""
    net = trainer.model
    net[0].requires_grad_(True)
    net[1].eval()
    net[3].p = 0.5


def frozen():
    net = plain()
    net[0].requires_grad_(False)
    return net


@pytest.mark.parametrize("devices", [1, 2])
def test_settings_changed_in_the_model_are_resumed(tmp_path, devices):
    one = wrapped(frozen, shards=2)
    fit(one)
    turned(one)
    one.save(tmp_path / "saved")
    fit(one)
    with wrapped(frozen, devices=devices, shards=2) as two:
        assert len(two.devices) == devices
        two.step((x[:64], y[:64]))
        two.restore(tmp_path / "saved")
        net = two.model
        assert (net[0].weight.requires_grad, net[1].training, net[3].p) == (True, False, 0.5)
        fit(two)
        assert two.digest() == one.digest()


def test_a_model_in_evaluation_mode_stays_in_it(tmp_path):
    trainer = wrapped()
    trainer.save(tmp_path / "saved")
    trainer.model.eval()
    trainer.restore(tmp_path / "saved")
    assert not any(module.training for module in trainer.model.modules())


def test_a_checkpoint_without_attributes_changes_none(tmp_path):
    """Older versions wrote such checkpoints."""
    trainer = wrapped(frozen)
    saved = trainer.session.snapshot()
    del saved.facts["attributes"]
    turned(trainer)
    trainer.session.restore(saved)
    assert trainer.model[3].p == 0.5


def test_a_saved_value_for_an_attribute_that_is_not_plain_is_refused(tmp_path):
    def rated(rate):
        net = nn.Linear(64, 10)
        net.rate = rate
        return net

    one, two = wrapped(lambda: rated(0.1)), wrapped(lambda: rated(float))
    one.save(tmp_path / "saved")
    before = two.digest()
    with pytest.raises(
        StateError,
        match=r"^The checkpoint .*: the attribute 'rate' is 0\.1 in the checkpoint and of type type in the model\.",
    ):
        two.restore(tmp_path / "saved")
    assert two.digest() == before


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"numbers": [{"params": [1]}]}, "Group 0 has the hyperparameter 'params' in the checkpoint, and the"),
        ({"numbers": [{"betas": 0.5}]}, r"Group 0 has betas=0.5 in the checkpoint and betas=\(0.9, 0.999\) in"),
        ({"numbers": [{"betas": (0.9,)}]}, r"Group 0 has betas=\(0.9,\) in the checkpoint and betas=\(0.9, 0.999\) in"),
        ({"numbers": [{"betas": (0.9, "x")}]}, r"Group 0 has betas=\(0.9, 'x'\) in the checkpoint and betas="),
        ({"numbers": [{"foreach": [1]}]}, r"Group 0 has foreach=\[1\] in the checkpoint and foreach=None in"),
        ({"numbers": [{"amsgrad": 3}]}, "Group 0 has amsgrad=3 in the checkpoint and amsgrad=False in the optimizer"),
        ({"numbers": [{"new": {}}]}, "Group 0 has the hyperparameter 'new' in the checkpoint, and the optimizer has"),
        ({"attributes": {}}, "modules is None in the checkpoint|trained is None in the checkpoint"),
        ({"attributes": {"trained": {}, "modules": 3, "optimizer": {}}}, "modules is 3 in the checkpoint"),
        (
            {"attributes": {"trained": {}, "modules": {"": {"forward": 3}}, "optimizer": {}}},
            "it has a value for 'forward', which is a",
        ),
        (
            {"attributes": {"trained": {"0.weight": 3}, "modules": {}, "optimizer": {}}},
            "trained.0.weight is 3 in the checkpoint",
        ),
        (
            {"attributes": {"trained": {}, "modules": {"1": {"p": "x"}}, "optimizer": {}}},
            "modules.1.p is 'x' in the checkpoint",
        ),
        (
            {"attributes": {"trained": {}, "modules": {}, "optimizer": {"step": 3}}},
            "it has a value for 'step', which is a method",
        ),
    ],
)
def test_forged_hyperparameters_are_refused_before_anything_is_loaded(facts, message):
    def made():
        net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
        return lockstep.wrap(net, torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), shards=2)

    one, two = made(), made()
    batch = torch.randn(8, 4), torch.arange(8) % 3
    one.step(batch)
    saved = one.session.snapshot()
    before = two.digest()
    with pytest.raises(StateError, match=message):
        two.session.restore(replace(saved, facts={**saved.facts, **facts}))
    assert two.digest() == before
    two.session.restore(saved)
    two.step(batch)


def test_values_added_by_a_scheduler_are_resumed():
    def made():
        net = nn.Linear(4, 3)
        return lockstep.wrap(
            net, torch.optim.SGD(net.parameters(), lr=0.1, foreach=True), nn.CrossEntropyLoss(), shards=2
        )

    one, two = made(), made()
    torch.optim.lr_scheduler.OneCycleLR(one.session.recipe.optimizer, max_lr=1.0, total_steps=9)
    two.session.recipe.optimizer.param_groups[0]["foreach"] = None
    two.session.restore(one.session.snapshot())
    assert two.session.recipe.optimizer.param_groups[0]["max_lr"] == 1.0
    assert two.session.recipe.optimizer.param_groups[0]["foreach"]


def test_a_checkpoint_with_a_removed_module_is_refused(tmp_path):
    one, two = (
        wrapped(),
        wrapped(lambda: nn.Sequential(*(part for part in plain() if not isinstance(part, nn.Dropout)))),
    )
    one.save(tmp_path / "saved")
    with pytest.raises(
        StateError,
        match=r"^The checkpoint does not fit this model: it has the attributes .* of a module '4', which the",
    ):
        two.restore(tmp_path / "saved")


def test_a_state_that_does_not_fit_changes_nothing(tmp_path):
    one = wrapped(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10)))
    two = wrapped(lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 10, bias=False)))
    one.save(tmp_path / "saved")
    with pytest.raises(StateError, match=r"The checkpoint does not fit this model: '1.bias' is not in the model"):
        two.restore(tmp_path / "saved")
    assert two.model[0].p == 0.2


def test_a_parameter_without_saved_optimizer_state_starts_without():
    """As in a state that was saved while the parameter was frozen."""
    trainer = wrapped()
    trainer.step((x[:64], y[:64]))
    trainer.load_state({name: array for name, array in trainer.state().items() if "optimizer.0.weight." not in name})
    first = trainer.model[0]
    assert first.weight not in trainer.optimizer.state
    assert first.bias in trainer.optimizer.state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("optimizer.0.weight.exp_avg"), "'0.weight.exp_avg' is missing from the checkpoint."),
        (
            lambda state: state.update({"optimizer.5.weight.step": state["optimizer.0.weight.step"]}),
            "'5.weight.step' is not in the optimizer.",
        ),
    ],
    ids=["a part of it", "another parameter's"],
)
def test_incomplete_optimizer_state_of_a_parameter_is_refused(change, message):
    trainer = wrapped()
    trainer.step((x[:64], y[:64]))
    before, state = trainer.digest(), trainer.state()
    change(state)
    with pytest.raises(StateError, match=f"^The checkpoint does not fit this optimizer: {message}"):
        trainer.load_state(state)
    assert trainer.digest() == before


def test_a_missing_tensor_of_the_loss_is_refused():
    criterion = nn.CrossEntropyLoss(weight=torch.ones(10))
    net = plain()
    trainer = lockstep.wrap(net, torch.optim.SGD(net.parameters(), 0.1), criterion, devices=1)
    with pytest.raises(StateError, match=r"does not fit this model: 'loss\.weight' is not in the model\."):
        wrapped(optimizer=torch.optim.SGD).load_state(trainer.state())
