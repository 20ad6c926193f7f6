"""PyTorch: forms, each beside the plain torch it stands for."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from backends.kit import (
    CLASS_WEIGHTS,
    CLASSES,
    EXAMPLE_WEIGHTS,
    GAPPED,
    HIDDEN,
    IGNORED,
    LABELS,
    NUM_EXAMPLES,
    VALUES,
    WEIGHTS,
    Form,
    X,
)
from backends.oracle import BINARY, PROBABILITIES, make_form
from lockstep.backends import torch as module

__all__ = [
    "compiles",
    "cross_entropy",
    "forms",
    "model",
    "module",
    "normalized",
    "nudge",
    "set_rate",
    "sgd",
    "short",
    "weights",
]

compiles = False

HEAVY = torch.tensor(CLASS_WEIGHTS)
WEIGHTLESS = torch.tensor(np.where(np.arange(CLASSES) == IGNORED, 0.0, CLASS_WEIGHTS))
PADDING = -100
LENGTHS = 1 + np.arange(NUM_EXAMPLES) * 6 // NUM_EXAMPLES  # 1 to 6 tokens, so that shards have unequal counts
TOKENS = np.random.Generator(np.random.PCG64(4)).integers(0, 11, (NUM_EXAMPLES, 6))
TAGS = np.where(np.arange(6) < LENGTHS[:, None], TOKENS % CLASSES, PADDING)


def model(weights, dropout=0.0):
    layers = []
    for index in range(len(weights) // 2):
        weight = torch.tensor(weights[f"{index}.weight"])
        layer = nn.Linear(*weight.shape, dtype=torch.float64)
        layer.weight.data.copy_(weight.T)
        layer.bias.data.copy_(torch.tensor(weights[f"{index}.bias"]))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-2], nn.Dropout(dropout), layers[-2])


def sgd(model, lr, momentum=0.0):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def cross_entropy():
    return nn.CrossEntropyLoss(ignore_index=IGNORED)


def weights(model):
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def nudge(model):
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1


def short(out, y):
    """The first output, as a loss in a type too short for most shares."""
    return out[0, 0].bfloat16()


def set_rate(optimizer, lr):
    optimizer.param_groups[0]["lr"] = lr


class normalized:
    """Batch norm alone: a model, what a plain pass over some examples leaves in it, and how to read that."""

    counters = ("num_batches_tracked",)
    loss = nn.MSELoss()

    @staticmethod
    def model():
        return nn.BatchNorm1d(X.shape[1], dtype=torch.float64)

    @staticmethod
    def run(model, x):
        model.train()(torch.tensor(x))

    @staticmethod
    def read(model):
        return {name: value.numpy().copy() for name, value in model.named_buffers()}


class Cat(nn.Module):
    """Inputs by position or by name."""

    def __init__(self):
        super().__init__()
        self.inner = model(WEIGHTS)

    def forward(self, left, right):
        return self.inner(torch.cat([left, right], 1))


class Tagger(nn.Module):
    """(examples, tokens) in, (examples, classes, tokens) out."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        table = torch.randn(11, HIDDEN, dtype=torch.float64, generator=generator)
        self.embedding = nn.Embedding.from_pretrained(table, freeze=False)
        self.head = nn.Linear(HIDDEN, CLASSES, dtype=torch.float64)
        nn.init.normal_(self.head.weight, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens):
        return self.head(self.embedding(tokens)).transpose(1, 2)


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Complete(nn.Module):
    """A model that brings its own loss."""

    def __init__(self, kind=Output):
        super().__init__()
        self.inner = model(WEIGHTS)
        self.kind = kind

    def forward(self, x, labels):
        logits = self.inner(x)
        return self.kind(loss=F.cross_entropy(logits, labels), logits=logits)


def mlp():
    return model(WEIGHTS)


def narrow():
    return model({**WEIGHTS, "1.weight": WEIGHTS["1.weight"][:, :1], "1.bias": WEIGHTS["1.bias"][:1]})


def log_probabilities():
    return nn.Sequential(mlp(), nn.LogSoftmax(1))


def tensors(batch):
    if isinstance(batch, dict):
        return {key: tensors(value) for key, value in batch.items()}
    return tuple(map(tensors, batch)) if isinstance(batch, tuple) else torch.tensor(np.asarray(batch))


def lines(loss, measured=lambda net, *batch: {}):
    """By hand: one pass over the whole batch, forward and backward."""

    def by_hand(net, batch):
        parts = tensors(batch)
        parts = parts if isinstance(parts, tuple) else (parts,)
        value = loss(net, *parts)
        value.backward()
        gradients = {name: parameter.grad.numpy() for name, parameter in net.named_parameters()}
        with torch.no_grad():
            return value.item(), gradients, {key: float(each) for key, each in measured(net, *parts).items()}

    return by_hand


def form(name, batch, loss, by_hand, model=mlp, metrics=(), measured=lambda net, *batch: {}):
    return Form(name, batch, loss, lines(by_hand, measured), model, metrics)


def same(name, loss, model=mlp, metrics=(), like=None):
    """A form whose results numpy knows."""
    return make_form(weights, name, loss, model, metrics, like)


def per_example(out, y):
    return ((out - y) ** 4).mean(1)


def mean(values, weights):
    return (values * weights).sum() / weights.sum()


def smooth(reduction="mean"):
    return nn.CrossEntropyLoss(HEAVY, ignore_index=IGNORED, label_smoothing=0.1, reduction=reduction)


def entropies(net, x, y, **options):
    return F.cross_entropy(net(x), y, reduction="none", **options)


def wide(weights):
    return weights[:, None]


class Focal(nn.CrossEntropyLoss):
    """A forward of its own: a plain mean, whatever the class it comes from divides by."""

    def forward(self, out, y):
        values = F.cross_entropy(out, y, reduction="none")
        return ((1 - torch.exp(-values)) ** 2 * values).mean()


class Gapped(nn.CrossEntropyLoss):
    """Torch's own forward, with other options."""

    def __init__(self):
        super().__init__(HEAVY, ignore_index=IGNORED)


@lockstep.objective
def mean_objective(net, batch):
    return F.cross_entropy(net(batch["x"]), batch["y"])


@lockstep.objective
def measuring_objective(net, batch):
    out = net(batch["x"])
    hits = (out.argmax(1) == batch["y"]).double()
    low = batch["y"] < 4
    values = {"mean": hits.mean(), "each": hits, "low": (hits[low].sum(), low.sum())}
    return F.cross_entropy(out, batch["y"]), values


@lockstep.objective
def turning_objective(net, batch):
    """Its values come in another order in every other shard."""
    loss, values = measuring_objective(net, batch)
    return loss, values if int(batch["y"][0]) % 2 else dict(reversed(values.items()))


@lockstep.objective
def pair_objective(net, batch):
    counted = (batch["y"] != IGNORED).double()
    return (F.cross_entropy(net(batch["x"]), batch["y"], reduction="none") * counted).sum(), counted.sum()


@lockstep.objective
def spreading_pair_objective(net, batch):
    """A tenth of every loss counts, also in a shard whose weight is 0."""
    counted = (batch["y"] != IGNORED).double()
    return (F.cross_entropy(net(batch["x"]), batch["y"], reduction="none") * (counted + 0.1)).sum(), counted.sum()


@lockstep.objective
def measuring_pair_objective(net, batch):
    return pair_objective(net, batch), {"size": batch["x"].abs().mean(1)}


@lockstep.objective
def objective_of_examples(net, batch):
    return F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")


def hit(out, y):
    return out.argmax(1) == y


def hits_of_low(out, y):
    return hit(out, y)[y < 4].sum(), (y < 4).sum()


def squared(out, y):
    return ((out - y) ** 2).sum(), out.numel()


def confusion(out, y):
    return F.one_hot(y * CLASSES + out.argmax(1), CLASSES**2).sum(0)


def trace(sums):
    return sums.reshape(CLASSES, CLASSES).trace() / sums.sum()


METRICS_OF_CLASSES = {
    "accuracy": "accuracy",
    "top5": "top5",
    "hit": hit,
    "low": hits_of_low,
    "trace": lockstep.Metric(confusion, trace),
}
METRICS_OF_VALUES = {
    "mse": "mse",
    "mae": "mae",
    "rmse": lockstep.Metric(squared, lambda sums: (sums[0] / sums[1]) ** 0.5),
}


def measure_without_padding(net, x, y):
    out, counted = net(x), y != PADDING
    top5 = (out.topk(5, dim=1).indices == y.unsqueeze(1)).any(1)
    return {"accuracy": (out.argmax(1) == y)[counted].double().mean(), "top5": top5[counted].double().mean()}


def squared_sum(out, y):
    return ((out - y) ** 2).sum()


class SquaredSum(nn.Module):
    def forward(self, out, y):
        return squared_sum(out, y)


def summed_pair(out, y):
    return lockstep.Sum(F.cross_entropy(out, y, reduction="none")[y != IGNORED].sum(), (y != IGNORED).sum())


@lockstep.objective
def sum_objective(net, batch):
    return summed_pair(net(batch["x"]), batch["y"])


@lockstep.objective
def whole_sum(net, batch):
    return lockstep.Sum(entropies(net, **batch).sum())


forms = [
    # Means over examples.
    same("cross entropy", nn.CrossEntropyLoss()),
    same("a function", F.cross_entropy, like="cross entropy"),
    same("a lambda", lambda out, y: F.cross_entropy(out, y), like="cross entropy"),
    same("probabilities as targets", nn.CrossEntropyLoss()),
    form(
        "probabilities as targets, class weights, smoothed",
        (X, PROBABILITIES),
        nn.CrossEntropyLoss(HEAVY, label_smoothing=0.1),
        lambda net, x, y: F.cross_entropy(net(x), y, HEAVY, label_smoothing=0.1),
    ),
    form(
        "divergence",
        (X, PROBABILITIES),
        nn.KLDivLoss(reduction="batchmean"),
        lambda net, x, y: (y * (y.log() - net(x))).sum() / len(x),
        log_probabilities,
    ),
    form("a class with a forward of its own", (X, LABELS), Focal(), lambda net, x, y: Focal()(net(x), y)),
    # Means over the targets that count.
    same("ignored targets", cross_entropy()),
    same("ignored targets, a partial function", partial(F.cross_entropy, ignore_index=IGNORED), like="ignored targets"),
    same("class weights", nn.CrossEntropyLoss(HEAVY)),
    same("class weights, a partial function", partial(F.cross_entropy, weight=HEAVY), like="class weights"),
    same("class weights and ignored targets", nn.CrossEntropyLoss(HEAVY, ignore_index=IGNORED)),
    form(
        "a class with torch's forward",
        (X, GAPPED),
        Gapped(),
        lambda net, x, y: mean(entropies(net, x, y), HEAVY[y] * (y != IGNORED)),
        metrics=["accuracy"],
        measured=lambda net, x, y: {"accuracy": hit(net(x), y)[y != IGNORED].double().mean()},
    ),
    form(
        "a class with torch's forward and example weights",
        (X, GAPPED, EXAMPLE_WEIGHTS),
        Gapped(),
        lambda net, x, y, w: mean(entropies(net, x, y), w * HEAVY[y] * (y != IGNORED)),
    ),
    form(
        "class weights of 0, smoothed",
        (X, GAPPED),
        nn.CrossEntropyLoss(WEIGHTLESS, label_smoothing=0.1),
        lambda net, x, y: F.cross_entropy(net(x), y, WEIGHTLESS, label_smoothing=0.1),
    ),
    form(
        "class weights of 0, smoothed, and ignored targets",
        (X, np.where(np.arange(NUM_EXAMPLES) < 20, GAPPED, 3 * (LABELS == IGNORED) + LABELS % 2)),
        nn.CrossEntropyLoss(WEIGHTLESS, ignore_index=0, label_smoothing=0.1),
        lambda net, x, y: F.cross_entropy(net(x), y, WEIGHTLESS, ignore_index=0, label_smoothing=0.1),
    ),
    form(
        "class weights of 0, smoothed, and example weights",
        (X, GAPPED, 0.5 + EXAMPLE_WEIGHTS),
        nn.CrossEntropyLoss(WEIGHTLESS, label_smoothing=0.1),
        lambda net, x, y, w: (
            (entropies(net, x, y, weight=WEIGHTLESS, label_smoothing=0.1) * w).sum() / (WEIGHTLESS[y] * w).sum()
        ),
    ),
    form(
        "class weights and ignored targets, smoothed",
        (X, GAPPED),
        smooth(),
        lambda net, x, y: F.cross_entropy(net(x), y, HEAVY, ignore_index=IGNORED, label_smoothing=0.1),
    ),
    form(
        "log probabilities",
        (X, GAPPED),
        nn.NLLLoss(HEAVY, ignore_index=IGNORED),
        lambda net, x, y: F.nll_loss(net(x), y, HEAVY, ignore_index=IGNORED),
        log_probabilities,
    ),
    same("log probabilities, a function", F.nll_loss, log_probabilities, like="cross entropy"),
    form(
        "padded sequences",
        (TOKENS, TAGS),
        nn.CrossEntropyLoss(),
        lambda net, x, y: entropies(net, x, y)[y != PADDING].mean(),
        Tagger,
    ),
    form(
        "padded sequences, class weights",
        (TOKENS, TAGS),
        nn.CrossEntropyLoss(HEAVY),
        lambda net, x, y: F.cross_entropy(net(x), y, HEAVY),
        Tagger,
    ),
    # Example weights.
    same("example weights", nn.CrossEntropyLoss()),
    same("example weights, a function", F.cross_entropy, like="example weights"),
    same("example and class weights", nn.CrossEntropyLoss(HEAVY)),
    same("example weights and ignored targets", cross_entropy()),
    same("example weights and probabilities as targets", nn.CrossEntropyLoss()),
    form(
        "padded sequences, example weights",
        (TOKENS, TAGS, EXAMPLE_WEIGHTS),
        nn.CrossEntropyLoss(),
        lambda net, x, y, w: mean(entropies(net, x, y), wide(w) * (y != PADDING)),
        Tagger,
    ),
    same("squares with example weights", nn.MSELoss()),
    same(
        "squares with example weights, a partial function",
        partial(F.mse_loss, reduction="none"),
        like="squares with example weights",
    ),
    same("squares with example weights in a column", nn.MSELoss()),
    same("one value per example, with weights", per_example),
    form(
        "divergence with example weights",
        (X, PROBABILITIES, EXAMPLE_WEIGHTS),
        nn.KLDivLoss(reduction="batchmean"),
        lambda net, x, y, w: mean((y * (y.log() - net(x))).sum(1), w),
        log_probabilities,
    ),
    form(
        "example weights in a list",
        (X, LABELS, EXAMPLE_WEIGHTS.tolist()),
        nn.CrossEntropyLoss(),
        lambda net, x, y, w: mean(entropies(net, x, y), w),
    ),
    form(
        "class weights and labels of 8 bits",
        (X, GAPPED.astype("uint8")),
        nn.CrossEntropyLoss(HEAVY, ignore_index=IGNORED),
        lambda net, x, y: F.cross_entropy(net(x), y.long(), HEAVY, ignore_index=IGNORED),
    ),
    # Sums.
    same("sum", nn.CrossEntropyLoss(reduction="sum")),
    form(
        "sum, class weights and ignored targets",
        (X, GAPPED),
        smooth("sum"),
        lambda net, x, y: smooth("sum")(net(x), y),
    ),
    same("sum of squares", nn.MSELoss(reduction="sum")),
    same("sum, a partial function", partial(F.cross_entropy, reduction="sum"), like="sum"),
    same("sum of squares, a partial function", partial(F.mse_loss, reduction="sum"), like="sum of squares"),
    same("sum with example weights", nn.CrossEntropyLoss(reduction="sum")),
    # One value per example.
    same("one value per example", per_example),
    same("no reduction", nn.CrossEntropyLoss(reduction="none"), like="cross entropy"),
    form(
        "no reduction, class weights",
        (X, LABELS),
        nn.CrossEntropyLoss(HEAVY, reduction="none"),
        lambda net, x, y: (entropies(net, x, y) * HEAVY[y]).mean(),
    ),
    same("no reduction, a partial function", partial(F.cross_entropy, reduction="none"), like="cross entropy"),
    same("no reduction, several values per example", nn.MSELoss(reduction="none"), like="squares"),
    # Means over elements.
    same("squares", nn.MSELoss()),
    same("squares, a function", F.mse_loss, like="squares"),
    form("huber", (X, VALUES), nn.SmoothL1Loss(), lambda net, x, y: F.smooth_l1_loss(net(x), y)),
    form(
        "binary targets with heavier positives",
        (X, BINARY),
        nn.BCEWithLogitsLoss(pos_weight=HEAVY),
        lambda net, x, y: F.binary_cross_entropy_with_logits(net(x), y, pos_weight=HEAVY),
    ),
    form(
        "binary targets with example weights",
        (X, BINARY, EXAMPLE_WEIGHTS),
        nn.BCEWithLogitsLoss(pos_weight=HEAVY),
        lambda net, x, y, w: mean(
            F.binary_cross_entropy_with_logits(net(x), y, pos_weight=HEAVY, reduction="none").mean(1), w
        ),
    ),
    # Objectives.
    same("objective", mean_objective),
    same("objective with values", measuring_objective),
    same("objective with values in any order", turning_objective, like="objective with values"),
    same("objective of (sum, weight)", pair_objective),
    same("objective of (sum, weight), a shard's weight 0 and its sum not", spreading_pair_objective),
    form(
        "objective of (sum, weight) with values",
        {"x": X, "y": GAPPED},
        measuring_pair_objective,
        lambda net, batch: F.cross_entropy(net(batch["x"]), batch["y"], ignore_index=IGNORED),
        measured=lambda net, batch: {"size": batch["x"].abs().mean()},
    ),
    same("objective of examples", objective_of_examples, like="objective"),
    same("objective of a Sum", sum_objective, like="objective of (sum, weight)"),
    same("objective of a Sum without a count", whole_sum),
    # Functions that are sums.
    same("a function that is a sum", squared_sum, like="sum of squares"),
    same("a module that is a sum", SquaredSum(), like="sum of squares"),
    same("a function that gives a Sum", summed_pair),
    # The model's own loss.
    same("an output with a loss", None, Complete, ["accuracy"], like="an output with a loss and logits"),
    same("a dict with a loss", None, lambda: Complete(dict), like="an output with a loss"),
    same(
        "a dict with a loss alone",
        None,
        lambda: Complete(lambda loss, logits: {"loss": loss}),
        like="an output with a loss",
    ),
    # Inputs.
    same("inputs by name", nn.CrossEntropyLoss(), Cat),
    same("inputs by position", nn.CrossEntropyLoss(), Cat),
    # Metrics.
    same("metrics of classes", nn.CrossEntropyLoss(), metrics=METRICS_OF_CLASSES),
    same("metrics of values", nn.MSELoss(), metrics=METRICS_OF_VALUES),
    same("metrics without ignored targets", cross_entropy(), metrics=["accuracy", "top5"]),
    form(
        "metrics without padding",
        (TOKENS, TAGS),
        nn.CrossEntropyLoss(),
        lambda net, x, y: F.cross_entropy(net(x), y),
        Tagger,
        ["accuracy", "top5"],
        measure_without_padding,
    ),
    same("metrics of probabilities", nn.CrossEntropyLoss(), metrics=["accuracy", "top5"]),
    same("accuracy of binary targets", nn.BCEWithLogitsLoss(), narrow, ["accuracy"]),
    same("accuracy of many binary targets", nn.BCEWithLogitsLoss(), metrics=["accuracy"]),
    same(
        "accuracy of probabilities for many binary targets",
        F.binary_cross_entropy,
        lambda: nn.Sequential(mlp(), nn.Sigmoid()),
        ["accuracy"],
        like="accuracy of many binary targets",
    ),
    same(
        "accuracy of a column and a vector of binary targets",
        lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y),
        narrow,
        ["accuracy"],
    ),
    *(
        same(
            f"accuracy of probabilities for binary targets, {name}",
            loss,
            lambda: nn.Sequential(narrow(), nn.Sigmoid()),
            ["accuracy"],
            like="accuracy of binary targets",
        )
        for name, loss in (
            ("a module", nn.BCELoss()),
            ("a function", F.binary_cross_entropy),
            ("a partial function", partial(F.binary_cross_entropy, reduction="mean")),
        )
    ),
    form(
        "a metric in a list",
        (X[:16], LABELS[:16]),  # two examples in a shard: a list of two is no (sum, weight)
        nn.CrossEntropyLoss(),
        lambda net, x, y: F.cross_entropy(net(x), y),
        metrics={"listed": lambda out, y: hit(out, y).tolist()},
        measured=lambda net, x, y: {"listed": hit(net(x), y).double().mean()},
    ),
]
