"""float16 with a dynamic loss scale."""

import math

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import NonFiniteError

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def wrapped(factor):
    """A trainer whose loss, and so its scaled gradient in float16, is `factor` times as large."""
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return lockstep.wrap(
        net,
        optimizer,
        lambda outputs, targets: ((outputs - targets) ** 2).mean() * factor,
        devices=1,
        shards=2,
        threads=1,
        precision="fp16",
    )


def scale(trainer):
    return trainer.session.backend.state()["scaler.scale"].data.item()


def test_an_overflow_skips_the_step_and_halves_the_scale():
    with wrapped(1e4) as trainer:
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        assert scale(trainer) == 2.0**16
        trainer.step((X, Y))
        assert scale(trainer) == 2.0**15
        assert all(torch.equal(trainer.model.state_dict()[name], value) for name, value in before.items())
        steps = 0
        while torch.equal(trainer.model.weight, before["weight"]):
            trainer.step((X, Y))
            steps += 1
            assert steps < 16


def test_without_an_overflow_the_scale_changes_no_bits():
    with wrapped(1.0) as trainer:
        logs = trainer.step((X, Y))
        norm = logs["grad_norm"]
        assert scale(trainer) == 2.0**16
        found = trainer.model.weight.detach().clone()
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    for start in (0, 8):
        with torch.autocast("cpu", torch.float16):
            value = ((net(X[start : start + 8]) - Y[start : start + 8]) ** 2).mean() * 0.5
        (value * 2.0**16).backward()
    for parameter in net.parameters():
        parameter.grad /= 2.0**16
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert torch.equal(net.weight, found)
    assert norm == pytest.approx(nn.utils.get_total_norm([each.grad for each in net.parameters()]).item(), rel=1e-6)


def test_the_scale_is_part_of_the_state():
    with wrapped(1e4) as trainer:
        state, before = trainer.session.backend.state(), trainer.digest()
        trainer.step((X, Y))
        assert scale(trainer) == 2.0**15
        trainer.session.backend.load(state)
        trainer.session.run.step = 0
        assert scale(trainer) == 2.0**16
        assert trainer.digest() == before


# -- beside torch's GradScaler over the whole batch


class Tokens(nn.Module):
    """(examples, tokens, 16) in, (examples, classes, tokens) out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.inner(x).transpose(1, 2)


def tokens(factor, ignored=0.0, examples=32, length=24):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, length, 16, generator=generator) * factor
    y = torch.randint(0, 8, (examples, length), generator=generator)
    return x, torch.where(torch.rand(y.shape, generator=generator) < ignored, -100, y)


def grad_scaler(batches, rate=1e-3, clip_norm=None, times=1.0):
    """The plain loop: (the scale after every step, the parameters afterwards)."""
    net = Tokens()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu")
    scales = []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            value = nn.functional.cross_entropy(net(x), y) * times
        scaler.scale(value).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, list(net.parameters())


def scaled(shards, rate=1e-3, devices=1, loss=None, **options):
    net = Tokens()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    loss = loss or nn.CrossEntropyLoss()
    return lockstep.wrap(net, optimizer, loss, devices=devices, shards=shards, threads=1, precision="fp16", **options)


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize(
    ("factor", "ignored"), [(1.0, 0.0), (1.0, 0.6), (30.0, 0.0), (1e3, 0.0), (1e3, 0.6)]
)  # of these steps torch leaves out 0, 0, 3, 8 and 8
def test_the_same_updates_are_left_out_as_by_grad_scaler(factor, ignored, shards):
    batch = tokens(factor, ignored)
    scales, parameters = grad_scaler([batch] * 12, rate=1e-6)
    with scaled(shards, rate=1e-6) as trainer:
        found = []
        for _ in range(12):
            trainer.step(batch)
            found.append(scale(trainer))
        assert found == scales
        if shards == 1:
            assert all(map(torch.equal, trainer.model.parameters(), parameters))
        for mine, theirs in zip(trainer.model.parameters(), parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_a_large_batch_of_tokens_trains_in_shards():
    """The gradient of its sum is beyond float16 with any scale from 1 on."""
    batch = tokens(1.0, examples=512, length=256)
    batch = batch[0], torch.zeros_like(batch[1])
    scales, parameters = grad_scaler([batch] * 2, rate=0.5)
    with scaled(2, rate=0.5) as trainer:
        for _ in range(2):
            trainer.step(batch)
        assert [scale(trainer)] == scales[1:] == [2.0**16]
        for mine, theirs in zip(trainer.model.parameters(), parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)


@lockstep.objective
def token_sum(net, batch):
    return nn.functional.cross_entropy(net(batch["x"]), batch["y"], reduction="sum"), (batch["y"] != -100).sum()


@pytest.mark.parametrize("form", ["example weights", "objective"])
def test_other_losses_with_a_denominator_are_scaled_alike(form):
    x, y = tokens(1.0, examples=256, length=64)
    batch = {"x": x, "y": y} if form == "objective" else (x, y, torch.full((256,), 2.0))
    with scaled(8, loss=token_sum if form == "objective" else None) as trainer:
        trainer.step(batch)
        assert scale(trainer) == 2.0**16


@pytest.mark.parametrize("shards", [1, 4])
def test_the_norm_is_of_the_gradient_without_scale(shards):
    batch = tokens(1.0, 0.5)
    _, parameters = grad_scaler([batch], rate=1.0, clip_norm=0.05)
    plain = Tokens()
    nn.functional.cross_entropy(plain(batch[0]), batch[1]).backward()
    norm = nn.utils.get_total_norm([each.grad for each in plain.parameters()]).item()
    assert norm > 0.1
    with scaled(shards, rate=1.0, clip_norm=0.05) as trainer:
        assert trainer.step(batch)["grad_norm"] == pytest.approx(norm, rel=5e-3)
        for mine, theirs in zip(trainer.model.parameters(), parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def test_the_scale_is_in_a_checkpoint_and_gives_the_same_bits_on_any_number_of_devices(tmp_path):
    batch = tokens(30.0, 0.6)
    with scaled(4) as trainer:
        for _ in range(5):
            trainer.step(batch)
        trainer.save(tmp_path / "middle")
        kept = scale(trainer)
        assert kept < 2.0**16
        for _ in range(3):
            trainer.step(batch)
        whole = trainer.digest()
    for devices in (1, 2):
        with scaled(4, devices=devices) as trainer:
            assert len(trainer.devices) == devices
            trainer.restore(tmp_path / "middle")
            assert scale(trainer) == kept
            for _ in range(3):
                trainer.step(batch)
            assert trainer.digest() == whole


@pytest.mark.parametrize("shards", [1, 2])
def test_a_loss_that_is_not_finite_is_left_out_as_grad_scaler_does(shards):
    good, bad = tokens(1.0), tokens(float("nan"))
    scales, parameters = grad_scaler([good, bad, good])
    assert scales == [2.0**16, 2.0**15, 2.0**15]
    with scaled(shards) as trainer:
        logs = [trainer.step(batch) for batch in (good, bad, good)]
        assert [math.isfinite(each["loss"]) for each in logs] == [True, False, True]
        assert scale(trainer) == 2.0**15
        assert trainer.num_steps == 3
        for mine, theirs in zip(trainer.model.parameters(), parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@lockstep.objective
def large_sum(net, batch):
    total, weight = token_sum.function(net, batch)
    return total * 1e5, weight


def test_a_scale_falls_below_1_like_that_of_grad_scaler():
    x, y = tokens(30.0)
    scales, _ = grad_scaler([(x, y)] * 24, rate=1e-12, times=1e5)
    assert scales[-4] == scales[-1] < 1
    with scaled(2, rate=1e-12, loss=large_sum) as trainer:
        found = []
        for _ in range(24):
            trainer.step({"x": x, "y": y})
            found.append(scale(trainer))
        assert found == scales


@pytest.mark.parametrize("devices", [1, 2])
def test_a_scale_that_stays_at_its_minimum_is_refused(devices):
    bad, good = tokens(float("inf")), tokens(1.0)
    with scaled(2, devices=devices) as trainer:
        for _ in range(40):
            trainer.step(bad)
        assert scale(trainer) == 2.0**-24
        before, steps = trainer.digest(), trainer.num_steps
        with pytest.raises(
            NonFiniteError,
            match=r"The float16 gradient of step 40 is not finite although the loss scale is already at its "
            r"minimum, 5.96046e-08: "
            r"each skipped update halves it. .* or use precision='bf16', which needs no loss scale.",
        ):
            trainer.step(bad)
        assert (trainer.num_steps, trainer.digest()) == (steps, before)
        trainer.step(good)
        assert trainer.num_steps == steps + 1
