"""The loss that a model's own output carries: any number of shards gives the mean over the whole batch's labels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import ModelError, NonFiniteError

VOCABULARY, LENGTH, ROWS = 13, 9, 8
LENGTHS = torch.tensor([9, 9, 8, 7, 3, 2, 2, 1])
IDS = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
PADDED = torch.where(torch.arange(LENGTH) < LENGTHS[:, None], IDS, -100)


class Language(nn.Module):
    """A language model with the interface of transformers': labels, `num_items_in_batch`, an output with `.loss`."""

    shifted = True

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, 12, dtype=dtype)
        self.mix = nn.GRU(12, 12, batch_first=True, dtype=dtype)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(12, VOCABULARY, dtype=dtype)

    def logits(self, input_ids):
        return self.head(self.dropout(self.mix(self.embedding(input_ids))[0]))

    def cross_entropy(self, logits, labels, num_items_in_batch=None, **options):
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if num_items_in_batch is None:
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", **options) / num_items_in_batch

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        logits = self.logits(input_ids)
        return {"loss": self.cross_entropy(logits, labels, num_items_in_batch), "logits": logits}


class Unshifted(Language):
    """As for masked tokens."""

    shifted = False


class OnlyLoss(Language):
    """Without logits, so it is called with `num_items_in_batch`; noise must not make a difference."""

    def forward(self, input_ids, labels=None, **kwargs):
        loss = self.cross_entropy(self.logits(input_ids), labels, **kwargs)
        return {"loss": loss}


class OnlyLossUnshifted(OnlyLoss):
    shifted = False


class Balanced(Language):
    """As a mixture of experts: a second term, which the number of labels does not divide."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.logits(input_ids)
        return {"loss": self.cross_entropy(logits, labels, **kwargs) + 0.25, "logits": logits}


class IgnoresNumItems(Language):
    """Takes every keyword and divides by the labels all the same."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.logits(input_ids)
        return {"loss": self.cross_entropy(logits, labels), "logits": logits}


class Plain(Language):
    """Takes no `num_items_in_batch`."""

    def forward(self, input_ids, labels):
        logits = self.logits(input_ids)
        return {"loss": self.cross_entropy(logits, labels), "logits": logits}


class Smoothed(Language):
    """Takes every keyword, ignores them, and is no cross-entropy of its logits and labels."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.logits(input_ids)
        return {"loss": self.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


class OfRows(Smoothed):
    """A mean over examples of their own means."""

    def forward(self, input_ids, labels, **kwargs):
        logits = self.logits(input_ids)
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        counted = labels != -100
        return {"loss": ((each * counted).sum(1) / counted.sum(1)).mean(), "logits": logits}


KINDS = [Language, Unshifted, OnlyLoss, OnlyLossUnshifted, Balanced, IgnoresNumItems, Plain]


def padded(rows=slice(None)):
    return {"input_ids": IDS[rows], "labels": PADDED[rows]}


def by_hand(kind, batch, dtype=torch.float32):
    net = kind(dtype)
    loss = net(**batch)["loss"]
    loss.backward()
    return loss.item(), [parameter.grad for parameter in net.parameters()]


def wrapped(kind, shards, devices=1, dtype=torch.float32, loss=None, **options):
    net = kind(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    return lockstep.wrap(net, optimizer, loss, devices=devices, shards=shards, threads=1, **options)


def step(trainer, batch):
    """The loss and the gradient of one step."""
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    logs = trainer.step(batch)
    return logs, [was - now.detach() for was, now in zip(before, trainer.model.parameters(), strict=True)]


@pytest.mark.parametrize("shards", [2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_give_the_mean_over_the_whole_batchs_labels(kind, shards):
    loss, gradients = by_hand(kind, padded())
    with wrapped(kind, shards) as trainer:
        assert trainer.evaluate(padded(), batch_size=ROWS)["loss"] == pytest.approx(loss, rel=1e-6)
        logs, found = step(trainer, padded())
        assert logs["loss"] == pytest.approx(loss, rel=1e-6)
        for mine, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_shard_has_the_bits_of_the_plain_loop(kind):
    net = kind()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with wrapped(kind, 1) as trainer:
        for rows in (slice(0, 4), slice(None)):
            optimizer.zero_grad()
            loss = net(**padded(rows))["loss"]
            loss.backward()
            optimizer.step()
            assert trainer.step(padded(rows))["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert all(map(torch.equal, net.parameters(), trainer.model.parameters()))


@pytest.mark.parametrize("kind", [Language, OnlyLoss, IgnoresNumItems])
@pytest.mark.parametrize("shards", [1, 3])
def test_an_evaluation_and_an_epoch_are_means_over_labels_too(kind, shards):
    """Over batches of 3 rows, which have unequal numbers of labels, and unequal lengths."""
    loss, _ = by_hand(kind, padded())
    with wrapped(kind, shards) as trainer:
        assert trainer.evaluate(padded(), batch_size=3)["loss"] == pytest.approx(loss, rel=1e-6)
    net = kind()
    batches = [padded(slice(start, start + 3)) for start in (0, 3, 6)]
    batches[1] = {name: value[:, :7] for name, value in batches[1].items()}
    with torch.no_grad():
        losses = torch.tensor([net(**batch)["loss"] for batch in batches])
    counts = torch.tensor([(batch["labels"][:, 1:] != -100).sum() for batch in batches])
    with lockstep.wrap(net, torch.optim.SGD(net.parameters(), lr=0.0), shards=shards, devices=1) as trainer:
        history = trainer.fit(batches, epochs=1, verbose=0)
    assert history.history["loss"][0] == pytest.approx(float((losses * counts).sum() / counts.sum()), rel=1e-6)


def test_the_kind_of_mean_is_determined_at_the_first_padded_rows():
    """Without ignored labels a mean over labels is one over examples; which one it is shows later."""
    loss, _ = by_hand(IgnoresNumItems, padded())
    with wrapped(IgnoresNumItems, 4, loss=None) as trainer:
        trainer.session.backend._recipe.optimizer.param_groups[0]["lr"] = 0.0
        trainer.step({"input_ids": IDS, "labels": IDS})
        assert trainer.step(padded())["loss"] == pytest.approx(loss, rel=1e-6)
    with wrapped(OfRows, 4) as trainer:
        full = {"input_ids": IDS, "labels": IDS}
        assert trainer.step(full)["loss"] == pytest.approx(by_hand(OfRows, full)[0], rel=1e-6)
        with pytest.raises(ModelError, match="The loss of OfRows is not the mean over the labels"):
            trainer.step(padded())


@pytest.mark.parametrize("shards", [2, 8])
def test_rows_without_a_label_that_counts_weigh_nothing(shards):
    labels = PADDED.clone()
    labels[4:] = -100
    labels[6:, 0] = 3  # which no logits predict
    batch = {"input_ids": IDS, "labels": labels}
    loss, gradients = by_hand(Language, batch)
    with wrapped(Language, shards) as trainer:
        logs, found = step(trainer, batch)
        assert logs["loss"] == pytest.approx(loss, rel=1e-6)
        for mine, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        before = trainer.digest()
        with pytest.raises(NonFiniteError):
            trainer.step({"input_ids": IDS, "labels": torch.full_like(IDS, -100)})
        assert trainer.digest() == before


@pytest.mark.parametrize(("kind", "most"), [(Language, 3), (OnlyLoss, 2), (IgnoresNumItems, 2)])
def test_the_same_bits_on_any_number_of_devices(kind, most):
    digests = set()
    for devices in (1, most):
        with wrapped(kind, 3, devices) as trainer:
            assert len(trainer.devices) == devices
            for rows in (slice(None), slice(5, None), slice(0, 4)):
                trainer.step(padded(rows))
            digests.add(trainer.digest())
    assert len(digests) == 1


@pytest.mark.parametrize("kind", [Smoothed, OfRows])
def test_an_unknown_kind_of_loss_is_refused_if_labels_are_ignored(kind):
    with wrapped(kind, 4) as trainer:
        before = trainer.digest()
        match = (
            rf"The loss of {kind.__name__} is not the mean over the labels that are not -100 \(it gives .* for 15 of "
            r"18 labels\) and does not divide by num_items_in_batch, .* "
            r"lockstep.Sum\(model\(\*\*batch\).loss \* count, count\); "
            r"or use shards=1."
        )
        with pytest.raises(ModelError, match=match):
            trainer.step(padded())
        assert trainer.digest() == before
    with wrapped(kind, 1) as trainer:  # the way out
        loss, _ = by_hand(kind, padded())
        assert trainer.evaluate(padded(), batch_size=ROWS)["loss"] == pytest.approx(loss, rel=1e-6)
        assert trainer.step(padded())["loss"] == pytest.approx(loss, rel=1e-6)


def test_the_ways_out_for_an_unknown_kind_of_loss_work():
    @lockstep.objective
    def of_labels(model, batch):
        count = (batch["labels"][:, 1:] != -100).sum()
        return lockstep.Sum(model(**batch)["loss"] * count, count)

    @lockstep.objective
    def of_examples(model, batch):
        return model(**batch)["loss"]

    rows = slice(0, 6)  # a shard whose rows are all padding but for one token would be 0 / 0
    for kind, loss in ((Smoothed, of_labels), (OfRows, of_examples)):
        with wrapped(kind, 2, loss=loss) as trainer:
            assert trainer.step(padded(rows))["loss"] == pytest.approx(by_hand(kind, padded(rows))[0], rel=1e-6)


class Turning(Plain):
    """A loss that is read one way in the first shard and another way in the second."""

    def forward(self, input_ids, labels):
        self.shifted = bool(input_ids[0, 0] == IDS[0, 0])
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("devices", [1, 2])
def test_shards_with_two_kinds_of_mean_are_refused(devices):
    ids = IDS.clone()
    ids[4, 0] = (IDS[0, 0] + 1) % VOCABULARY
    labels = torch.where(torch.arange(ROWS)[:, None] < 4, IDS, PADDED)  # the second shard is asked for its own
    with wrapped(Turning, 2, devices, exact=False) as trainer:
        before = trainer.digest()
        with pytest.raises(
            ModelError, match=r"The model's loss is a mean over the labels .* in every shard\. Write an obj"
        ):
            trainer.step({"input_ids": ids, "labels": labels})
        assert trainer.digest() == before


def test_labels_by_position_and_integers_that_are_no_classes():
    class Counting(nn.Module):
        """Squared errors of integers."""

        def __init__(self, dtype):
            super().__init__()
            torch.manual_seed(1)
            self.inner = nn.Linear(3, 1, dtype=dtype)

        def forward(self, x, labels):
            return {"loss": ((self.inner(x)[:, 0] - labels) ** 2).mean(), "logits": self.inner(x)}

    x, y = torch.randn(7, 3), torch.arange(7) * 100
    expected = Counting(torch.float32)(x, y)["loss"].item()
    with wrapped(Counting, 3) as trainer:
        assert trainer.step((x, y))["loss"] == pytest.approx(expected, rel=1e-6)
    loss, _ = by_hand(Plain, padded())
    with wrapped(Plain, 3) as trainer:
        assert trainer.step((IDS, PADDED))["loss"] == pytest.approx(loss, rel=1e-6)


def test_a_batch_that_brings_its_shifted_labels():
    class Shifting(Language):
        def forward(self, input_ids, labels, shift_labels):
            logits = self.logits(input_ids)
            return {"loss": F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()), "logits": logits}

    shifted = torch.nn.functional.pad(PADDED, (0, 1), value=-100)[:, 1:]
    batch = {**padded(), "shift_labels": shifted}
    with wrapped(Shifting, 3) as trainer:
        assert trainer.step(batch)["loss"] == pytest.approx(by_hand(Shifting, batch)[0], rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.float32), ("fp16", torch.float32), (None, torch.bfloat16)]
)
@pytest.mark.parametrize("kind", [Language, IgnoresNumItems])
def test_losses_in_float16_and_bfloat16(kind, precision, dtype):
    loss, gradients = by_hand(kind, padded(), dtype)
    with wrapped(kind, 4, dtype=dtype, precision=precision) as trainer:
        logs, found = step(trainer, padded())
        assert logs["loss"] == pytest.approx(loss, rel=1e-2)
        for mine, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=1e-2)


def test_probing_the_model_does_not_change_it():
    """Batch norm's statistics, the mode and the generators are those of the plain loop."""

    class Normed(OnlyLoss):
        def __init__(self, dtype):
            super().__init__(dtype)
            self.norm = nn.BatchNorm1d(12)
            self.dropout = nn.Dropout(0.5)

        def logits(self, input_ids):
            return self.head(self.dropout(self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)))

    net = Normed(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    from lockstep.core import seeds

    torch.manual_seed(seeds.shard(0, 0, 0))
    net(**padded())["loss"].backward()
    optimizer.step()
    with wrapped(Normed, 1, seed=0) as trainer:
        trainer.step(padded())
        mine, theirs = trainer.model.state_dict(), net.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
