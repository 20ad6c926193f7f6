"""Models, optimizers, losses and batches that are not supported, and the messages."""

import copy
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.core.batches import OBJECTIVE_EXAMPLE
from lockstep.errors import BatchError, ExactError, ModelError, NonFiniteError, OptimizerError

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def wrapped(net=None, loss=None, **options):
    net = net or nn.Linear(5, 3)
    options = {"devices": 1, "shards": 4, "threads": 1, **options}
    return lockstep.wrap(net, sgd(net), nn.CrossEntropyLoss() if loss is None else loss, **options)


def spread():
    return nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            spread,
            "The model is already wrapped in DistributedDataParallel, but Lockstep does the distribution. "
            "Wrap the plain model: lockstep.wrap(model.module, ...).",
        ),
        (
            lambda: nn.DataParallel(nn.Linear(5, 3)),
            "The model is already wrapped in DataParallel, but Lockstep does the distribution. "
            "Wrap the plain model: lockstep.wrap(model.module, ...).",
        ),
        (
            lambda: torch.compile(nn.Linear(5, 3)),
            "The model is compiled with torch.compile, but Lockstep needs the plain model, because each shard runs at "
            "its own shape. Wrap the plain model: lockstep.wrap(model._orig_mod, ...), on CPUs with compile=True to "
            "have it compiled.",
        ),
        (
            lambda: nn.Sequential(nn.Linear(5, 3), nn.SyncBatchNorm(3)),
            "The SyncBatchNorm at '1' is not supported, because each shard has its own batch norm statistics. "
            "Use BatchNorm1d, BatchNorm2d or BatchNorm3d; for statistics over the whole batch use shards=1.",
        ),
        (
            lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True)),
            "The module '0' has sparse=True, which is not supported. Use sparse=False.",
        ),
        (
            lambda: nn.Sequential(nn.EmbeddingBag(5, 3, mode="sum", sparse=True)),
            "The module '0' has sparse=True, which is not supported. Use sparse=False.",
        ),
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            "The LazyLinear at '0' takes its shape from the first batch, but the model's parameters must exist when it "
            "is wrapped. Call the model once on a batch before lockstep.wrap.",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by torch.compile
def test_unsupported_models_are_refused(make, message):
    with pytest.raises(ModelError) as caught:
        lockstep.wrap(make(), sgd(nn.Linear(2, 2)), nn.CrossEntropyLoss(), devices=1)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda net: torch.optim.LBFGS(net.parameters()),
            "LBFGS is not supported, because it evaluates the model several times a step. "
            "Use another optimizer, such as torch.optim.Adam.",
        ),
        (
            lambda net: torch.optim.SparseAdam(net.parameters()),
            "SparseAdam is not supported, because sparse gradients are not. Use torch.optim.Adam.",
        ),
        (
            lambda net: sgd(copy.deepcopy(net)),
            "2 of the optimizer's parameters did not come from this model. Create the optimizer from the "
            "model: torch.optim.SGD(model.parameters(), lr=0.1). If the parameters belong to a loss or to another "
            "network, wrap one module that has both: nn.ModuleDict({'net': net, 'loss': loss}), with an objective that "
            "calls both.",
        ),
        (
            lambda net: "sgd",
            "A PyTorch model needs a torch.optim optimizer. Got str. "
            "Use for example torch.optim.SGD(model.parameters(), lr=0.1).",
        ),
        (
            lambda net: None,
            "A PyTorch model needs a torch.optim optimizer. Got NoneType. "
            "Use for example torch.optim.SGD(model.parameters(), lr=0.1).",
        ),
    ],
)
def test_unsupported_optimizers_are_refused(make, message):
    net = nn.Linear(5, 3)
    with pytest.raises(OptimizerError) as caught:
        lockstep.wrap(net, make(net), nn.CrossEntropyLoss(), devices=1)
    assert str(caught.value) == message


def test_a_loss_of_another_type_is_refused():
    with pytest.raises(ModelError) as caught:
        wrapped(loss="cross_entropy")
    assert str(caught.value) == (
        "loss='cross_entropy' is not a loss. Use a torch.nn loss, a function of (outputs, targets) or a "
        "lockstep.objective."
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3, "Got builtins.int. Give lockstep.wrap the model itself."),
        (nn.Linear, "Got builtins.type. Give lockstep.wrap the model itself."),
    ],
)
def test_objects_that_are_no_model_are_refused(model, message):
    with pytest.raises(ModelError) as caught:
        lockstep.wrap(model, None, None)
    assert str(caught.value).startswith("The model must be a torch.nn.Module, ")
    assert str(caught.value).endswith(message)


def frozen():
    return nn.Linear(5, 3).requires_grad_(False)


class Unsure(nn.Module):
    """Uses an operation without a deterministic form."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x):
        return self.inner(x).put_(torch.tensor([0]), torch.zeros(1))


class Sparse(nn.Module):
    """Gives a sparse gradient without saying so beforehand."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return F.embedding(x.long().abs() % 5, self.table, sparse=True).sum(1)


class Silent(nn.Linear):
    """Forgets to return."""

    def forward(self, x):
        super().forward(x)


class Losing(nn.Linear):
    """Gives some losses of its own."""

    def __init__(self, count):
        super().__init__(5, 3)
        self.count = count

    def forward(self, x):
        return {"loss": super().forward(x)[: self.count].mean(1)}


WRONG = torch.cat([Y[:8], torch.tensor([2, 7, 1, 1]), Y[12:]])  # in the third of four shards


@pytest.mark.parametrize(
    ("make", "batch", "error", "message"),
    [
        (
            lambda: wrapped(frozen()),
            (X, Y),
            ModelError,
            "No parameter would be trained: all 2 are frozen or not in the optimizer. "
            "Set requires_grad=True on some, and give them to the optimizer.",
        ),
        (
            lambda: wrapped(loss=lambda outputs, targets: torch.tensor(1.0)),
            (X, Y),
            ModelError,
            "The loss does not depend on any parameter that is trained, so it has no gradient. "
            "Compute the loss from the model's outputs, outside torch.no_grad().",
        ),
        (
            lambda: wrapped(loss=lambda outputs, targets: 1.0),
            (X, Y),
            ModelError,
            "A loss must return one number, one per example, or lockstep.Sum(total, count). "
            "Got float for a shard of 4.",
        ),
        (
            lambda: wrapped(loss=lambda outputs, targets: outputs[:3]),
            (X, Y),
            ModelError,
            "A loss must return one number, one per example, or lockstep.Sum(total, count). "
            "Got Tensor(3, 3) for a shard of 4.",
        ),
        (
            lambda: wrapped(loss=F.mse_loss),
            (X, X[:, :3], torch.ones(16)),
            ModelError,
            "Example weights need a loss that gives one value per example. Got Tensor() for a shard of 4. "
            "Return one value per example, or write an objective that returns lockstep.Sum(total, count).",
        ),
        (
            lambda: wrapped(loss=lockstep.objective(lambda net, batch: 3)),
            (X, Y),
            ModelError,
            "An objective must return the shard's mean loss as an array, one loss per example, "
            "lockstep.Sum(total, count), or (one of these, {name: value}). Got int for a shard of 4.",
        ),
        (
            lambda: lockstep.wrap(net := nn.Linear(5, 3), sgd(net), None, devices=1, shards=4),
            X,
            ModelError,
            "Without a loss in wrap, the model's output must have the loss as `.loss`. Got Tensor(4, 3). "
            "Give wrap a loss, or return an output with `.loss`.",
        ),
        (
            lambda: lockstep.wrap(net := Losing(3), sgd(net), None, devices=1, shards=4),
            X,
            ModelError,
            "The loss in a model's output must be one number, or one per example. Got shape (3,) for a shard of 4. "
            "Return its mean.",
        ),
        (
            wrapped,
            (X, Y, 1),
            BatchError,
            "There must be one example weight per example. Got weights of shape () for a shard of 4 examples. "
            "Give a vector with one number for each example of the batch.",
        ),
        (
            lambda: wrapped(loss=lockstep.objective(lambda net, batch: net(batch[0]).mean()), metrics=["accuracy"]),
            (X, Y),
            ModelError,
            "The metric 'accuracy' compares outputs with targets, but this loss gives Lockstep neither. "
            "Use an objective that also returns the metric: return loss, {'name': value}.",
        ),
        (
            lambda: wrapped(metrics={"odd": lambda outputs, targets: outputs[:3]}),
            (X, Y),
            ModelError,
            "A metric must return one value per example, or (sum, weight). "
            "Got shape (3, 3) from 'odd' for a shard of 4. "
            "Return one of these.",
        ),
        (
            lambda: wrapped(metrics=["mse"]),
            (X, Y),
            ModelError,
            "mse and mae need outputs and targets of the same shape. Got (4, 3) and (4,). Reshape one of them.",
        ),
        (
            lambda: wrapped(Sparse()),
            (X, Y),
            ModelError,
            "A parameter has got a sparse gradient, which is not supported. Use torch.nn.Embedding(..., sparse=False).",
        ),
        (
            lambda: wrapped(loss=lambda outputs, targets: (outputs - targets).square().mean(), metrics=["accuracy"]),
            (X, Y[:, None]),
            ModelError,
            "accuracy cannot compare outputs of shape (4, 3) with targets of shape (4, 1). Give targets of shape "
            "(4, 3), or labels of shape (4,) (axis 1 is the classes), or your own metric, a function of (outputs, "
            "targets).",
        ),
        (
            lambda: wrapped(Silent(5, 3)),
            (X, Y),
            ModelError,
            "The model Silent returned None instead of its outputs. End the model's forward method with `return "
            "outputs`.",
        ),
        (
            wrapped,
            (X, WRONG),
            BatchError,
            "Labels must be from 0 to 2. Got 7. Fix the labels, or give the model's last layer more outputs.",
        ),
        (
            wrapped,
            {"x": X, "y": Y},
            BatchError,
            "The batch {'x': Tensor(4, 5), 'y': Tensor(4,)} cannot be used with a loss of (outputs, targets). Give "
            "(inputs, targets) or (inputs, targets, weights), or write an objective:\n" + OBJECTIVE_EXAMPLE,
        ),
        (
            wrapped,
            (X[:0], Y[:0]),
            BatchError,
            "The batch (Tensor(0, 5), Tensor(0,)) has no examples. Leave empty batches out.",
        ),
        (
            wrapped,
            (X, Y[1:]),
            BatchError,
            "The arrays of a batch have different lengths, 16, 15, in (Tensor(16, 5), Tensor(15,)). "
            "Use arrays with one entry per example.",
        ),
        (
            lambda: wrapped(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), shards=8),
            (X[:15], Y[:15]),  # shards of 2, and the last of 1
            BatchError,
            "Shard 7 of step 0 has too few examples for batch norm, which needs more than one value per channel: "
            "the batch has 15 examples in 8 shards. Use fewer shards, a larger batch, or leave the short last batch "
            "out.",
        ),
    ],
)
def test_steps_that_cannot_be_computed_are_refused(make, batch, error, message):
    with make() as trainer:
        before = trainer.digest()
        with pytest.raises(error) as caught:
            trainer.step(batch)
        assert str(caught.value) == message
        assert trainer.digest() == before


def test_weights_of_another_shape_are_refused():
    """Weights must be one per example; with one example in a shard, broadcasting would hide one per element."""
    with wrapped(loss=nn.MSELoss(), shards=8) as trainer, pytest.raises(lockstep.LockstepError, match="weight"):
        trainer.step((X[:8], X[:8, :3], torch.rand(8, 3)))


def test_an_operation_without_a_deterministic_form_is_named():
    with wrapped(Unsure()) as trainer:
        with pytest.raises(ExactError) as caught:
            trainer.step((X, Y))
        assert str(caught.value) == (
            "An exact run needs deterministic operations, but torch has no deterministic form of put_. "
            "Replace it, or use lockstep.wrap(..., exact=False) to train without bit-identical results."
        )
    with wrapped(Unsure(), exact=False) as trainer:
        trainer.step((X, Y))
        assert trainer.digest().startswith("inexact:")
        with pytest.raises(ExactError) as caught:
            trainer.verify((X, Y), devices=(1,))
        assert str(caught.value) == (
            "verify cannot be used with exact=False, because the bits may then differ. Use exact=True in lockstep.wrap."
        )


@pytest.mark.parametrize("num_shards", [4, 1])
def test_a_loss_that_is_not_finite_names_step_and_shard_and_changes_nothing(num_shards):
    net = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    with wrapped(net, shards=num_shards) as trainer:
        trainer.step((X, Y))
        before = trainer.digest()
        bad = X.clone()
        bad[10] = torch.nan  # in shard 2 of 4
        with pytest.raises(NonFiniteError) as caught:
            trainer.step((bad, Y))
        assert str(caught.value).startswith(f"The loss is nan in step 1, shard {2 if num_shards == 4 else 0}. ")
        assert trainer.digest() == before
        trainer.step((X, Y))


def test_an_error_raised_by_the_model_names_the_shard():
    class Picky(nn.Linear):
        def forward(self, x):
            if (x == 9).any():
                raise KeyError("nine")
            return super().forward(x)

    nines = X.clone()
    nines[5] = 9
    with wrapped(Picky(5, 3)) as trainer:
        with pytest.raises(KeyError, match="nine") as caught:
            trainer.step((nines, Y))
        assert caught.value.__notes__ == ["In shard 1 of step 0."]


@pytest.mark.parametrize(
    "error",
    [IndexError("index 3 is out of bounds"), ValueError("the policy is deterministic")],
    ids=["an index", "a word"],
)
def test_an_error_raised_by_the_loss_is_unchanged(error):
    def loss(outputs, targets):
        raise error

    with wrapped(loss=loss) as trainer, pytest.raises(type(error)) as caught:
        trainer.step((X, Y))
    assert caught.value is error


def test_outputs_that_are_not_one_per_example_are_refused():
    class Pooled(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean(0, keepdim=True)

    with wrapped(Pooled(5, 3)) as trainer, pytest.raises(BatchError) as caught:
        trainer.predict(X)
    assert str(caught.value) == (
        "The model returned ndarray(1, 3) for 4 examples. Return arrays, or tuples, lists and dicts of them, with one "
        "row per example on axis 0."
    )


def test_too_many_sums_are_refused():
    wide = lockstep.Metric(lambda outputs, targets: outputs.new_zeros(2000), lambda sums: 0.0, "wide")
    with wrapped(metrics=[wide]) as trainer, pytest.raises(ModelError) as caught:
        trainer.step((X, Y))
    assert str(caught.value).startswith("The metrics of a step can have at most ")


def test_a_group_with_parameters_of_another_model_is_refused():
    net = nn.Linear(5, 3)
    optimizer = sgd(net)
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1) as trainer:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(OptimizerError) as caught:
            trainer.session.backend.controls()
    assert str(caught.value) == (
        "1 of the optimizer's parameters did not belong to the model when it was wrapped. "
        "Call lockstep.wrap again after changing the model."
    )


class Locked(nn.Module):
    """Has an attribute that cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.inner.guard = threading.Lock()

    def forward(self, x):
        return self.inner(x)


def test_objects_that_cannot_be_pickled_are_named():
    with pytest.raises(ModelError) as caught:
        wrapped(Locked(), devices=2)
    assert str(caught.value) == (
        "The attribute 'inner.guard' of type lock cannot be pickled, so it cannot be sent to a worker process: "
        "cannot pickle '_thread.lock' object. "
        "Create it in the forward pass, or leave it out with __getstate__; or start the script with torchrun, whose "
        "processes create the model themselves; or use devices=1."
    )
    with wrapped(Locked()) as trainer:
        trainer.step((X, Y))


def test_a_loss_that_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def loss(outputs, targets, guard=lock):
        return F.cross_entropy(outputs, targets)

    with pytest.raises(ModelError, match=r"The loss cannot be pickled"):
        wrapped(loss=loss, devices=2)


@pytest.mark.parametrize("reduce", [nn.CrossEntropyLoss(), partial(F.cross_entropy, label_smoothing=0.1)])
def test_numpy_and_torch_batches_are_the_same(reduce):
    found = set()
    for batch in ((X, Y), (X.numpy(), Y.numpy()), [X, Y], (X, np.asarray(Y))):
        torch.manual_seed(0)
        with wrapped(loss=reduce) as trainer:
            trainer.step(batch)
            found.add(trainer.digest())
    assert len(found) == 1


def test_a_model_loss_for_each_example_is_averaged():
    net = Losing(None)
    expected = net(X)["loss"].mean().item()
    with lockstep.wrap(net, sgd(net), None, devices=1, shards=4) as trainer:
        assert trainer.step(X)["loss"] == pytest.approx(expected, rel=1e-5)


class Outer(torch.optim.Optimizer):
    """As the Lookahead of several packages: around another optimizer."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner


class Lookahead(torch.optim.Adam):
    """The same by inheritance: every third step goes half of the way from the slow parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                slow = own["slow"] if "slow" in own else own.setdefault("slow", parameter.clone())
                if int(own["step"]) % 3 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))


def test_an_optimizer_in_an_optimizer_is_refused_and_a_subclass_works():
    net = nn.Linear(5, 3)
    with pytest.raises(OptimizerError, match=r"Outer has a second optimizer, 'inner', .* a subclass of Adam that does"):
        lockstep.wrap(net, Outer(torch.optim.Adam(net.parameters())), nn.CrossEntropyLoss(), devices=1)
    digests = set()
    for devices in (["cpu"], ["cpu"] * 2):
        torch.manual_seed(0)
        net = nn.Linear(5, 3)
        loss = nn.CrossEntropyLoss()
        with lockstep.wrap(net, Lookahead(net.parameters()), loss, devices=devices, shards=2) as trainer:
            for _ in range(4):
                trainer.step((X, Y), verbose=0)
            assert any(name.endswith("slow") for name in trainer.state())
            digests.add(trainer.digest())
    assert len(digests) == 1


class Counting(torch.optim.SGD):
    """Has optimizer state under a string."""

    def step(self, closure=None):
        self.state["global"]["step"] = 1
        return super().step(closure)


def test_keys_of_the_optimizer_state_that_are_no_parameters_are_refused():
    net = nn.Linear(5, 3)
    trainer = lockstep.wrap(net, Counting(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), devices=1, shards=4)
    trainer.step((X, Y))
    for use in (lambda: trainer.step((X, Y)), trainer.state, trainer.digest):
        with pytest.raises(OptimizerError) as caught:
            use()
        assert str(caught.value) == (
            "The keys of optimizer.state must be the model's parameters. Got 'global', whose state no checkpoint "
            "would contain. Keep values that belong to no parameter, such as counters, in a parameter group or in the "
            "optimizer's own attributes."
        )


def test_metrics_get_the_logits_of_a_dict():
    class Complete(nn.Linear):
        def forward(self, x, labels):
            logits = super().forward(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    net = Complete(5, 3)
    expected = (F.linear(X, net.weight, net.bias).argmax(1) == Y).double().mean().item()
    inputs = {"x": X, "labels": Y}
    with lockstep.wrap(net, sgd(net), None, metrics=["accuracy"], devices=1, shards=4) as trainer:
        assert trainer.step(inputs)["accuracy"] == expected


def test_a_lazy_module_that_was_called_is_accepted():
    net = nn.LazyLinear(3)
    net(X)
    with wrapped(net) as trainer:
        trainer.step((X, Y))
