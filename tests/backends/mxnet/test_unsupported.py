"""What is not supported, and what each error says."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm

import lockstep
from backends.mxnet.models import BATCH, X, Y, loss, net, weights, wrapped
from lockstep.errors import (
    BatchError,
    ExactError,
    LaunchError,
    ModelError,
    NonFiniteError,
    OptimizerError,
    PlanError,
    StateError,
)


def bare():
    return nn.Dense(10)


def sparse():
    made = nn.Embedding(10, 4, sparse_grad=True)
    made.initialize()
    return made


def synchronous():
    made = nn.HybridSequential()
    made.add(nn.Dense(10), SyncBatchNorm(num_devices=2))
    made.initialize()
    return made


def frozen():
    made = net()
    made.collect_params().setattr("grad_req", "null")
    return made


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (bare, "Parameter 'weight' is not initialized. Call net.initialize"),
        (sparse, "'weight' is sparse or has a sparse gradient, which is not supported. Use"),
        (synchronous, "'syncbatchnorm.* is a SyncBatchNorm, which is not supported"),
        (frozen, "nothing to train: all of its 10 parameters have grad_req='null'"),
    ],
)
def test_blocks(block, message):
    with pytest.raises(ModelError, match=message):
        wrapped(block())


def stepped():
    block = net()
    block.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
    block(nd.array(X))
    trainer = gluon.Trainer(block.collect_params(), "sgd", kvstore="device", update_on_kvstore=True)
    trainer._init_kvstore()
    return block, trainer


def scaled():
    block = net()
    trainer = gluon.Trainer(block.collect_params(), "sgd")
    trainer._amp_loss_scaler = object()
    return block, trainer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: (net(), "sdg"), "no optimizer named 'sdg'. Use one of .*sgd"),
        (lambda: (net(), ("sgd", {"rate": 1})), r"Optimizer 'sgd' cannot be created with \{'rate': 1\}"),
        (lambda: (net(), 0.1), "optimizer=0.1 is not an optimizer. Use a name, .* or a gluon.Trainer"),
        (
            lambda: (net(), gluon.Trainer(net().collect_params(), "sgd")),
            "10 parameters that the block does not",
        ),
        (stepped, "optimizer state in a kvstore, .* update_on_kvstore=False"),
        (scaled, "amp's loss scaler"),
    ],
)
def test_optimizers(given, message):
    block, optimizer = given()
    with pytest.raises(OptimizerError, match=message):
        wrapped(block, optimizer)


def test_an_optimizer_that_does_not_resume_exactly():
    with pytest.raises(ExactError, match=r"LBSGD is not supported, .*\. Use 'lars'"):
        wrapped(net(), "lbsgd")
    wrapped(net(), "lbsgd", exact=False).close()


def test_a_rate_that_follows_a_schedule():
    optimizer = mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(step=10, base_lr=0.1))
    with wrapped(net(), optimizer) as trainer:
        with pytest.raises(OptimizerError, match=r"Cannot set lr=0.5, because .* lr_scheduler sets"):
            trainer.learning_rates = (0.5,)
        trainer.learning_rates = trainer.learning_rates


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        ("crossentropy", "no loss named 'crossentropy'. Use one of .*cross_entropy"),
        (3, "loss=3 is not a loss. Use a gluon loss, its name, a function of"),
    ],
)
def test_losses(criterion, message):
    with pytest.raises(ModelError, match=message):
        wrapped(net(), criterion=criterion)


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (lambda out, y: nd.ones((3, 2)), r"one number, one per example, or .*Got NDArray\(3, 2\) for a shard of 8"),
        (lambda out, y: 3.0, r"one number, one per example, or lockstep.Sum\(total, count\). Got float"),
        (lambda out, y: out.detach().sum(), "does not depend on any parameter that is trained"),
        (lockstep.objective(lambda block, batch: "no"), "An objective must return the shard's mean loss .*. Got str"),
    ],
)
def test_outputs_of_losses(criterion, message):
    with wrapped(net(), criterion=criterion) as trainer, pytest.raises(ModelError, match=message):
        trainer.step(BATCH)


def test_other_metrics_in_another_shard():
    @lockstep.objective
    def moody(block, batch):
        names = ("a", "b") if int(batch[1][0].asscalar()) % 2 else ("a",)
        return loss()(block(batch[0]), batch[1]).mean(), dict.fromkeys(names, 1.0)

    with wrapped(net(), criterion=moody) as trainer, pytest.raises(ModelError, match="same metrics for every shard"):
        trainer.step(BATCH)


def test_another_form_in_another_shard():
    @lockstep.objective
    def moody(block, batch):
        value = loss()(block(batch[0]), batch[1])
        return (value.sum(), nd.array([8.0])) if int(batch[1][0].asscalar()) % 2 else value

    with (
        wrapped(net(), criterion=moody) as trainer,
        pytest.raises(ModelError, match="a mean for one shard and a sum"),
    ):
        trainer.step(BATCH)


def test_metrics_without_targets_are_refused():
    @lockstep.objective
    def objective(block, batch):
        return loss()(block(batch[0]), batch[1]).mean()

    with (
        wrapped(net(), criterion=objective, metrics=["accuracy"]) as trainer,
        pytest.raises(ModelError, match="compares outputs with targets, but this loss gives"),
    ):
        trainer.step(BATCH)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X, r"cannot be used with a loss of \(outputs, targets\). Give \(inputs, targets\)"),
        ((X, Y + 1), "Labels must be from 0 to 9. Got 10. Fix the labels"),
        ((X, np.where(Y > 3, Y, np.nan)), "Labels must be from 0 to 9. Got nan. Fix the labels"),
        ((X, Y, 1), r"There must be one example weight per example. Got weights of shape \(\) for a shard of 8"),
        ((X, Y, np.ones((61, 2))), r"There must be one example weight per example. Got weights of shape \(8, 2\)"),
    ],
)
def test_batches(batch, message):
    with wrapped(net()) as trainer, pytest.raises(BatchError, match=message):
        trainer.step(batch)


def test_example_weights_for_a_loss_of_one_number():
    def mean(outputs, targets):
        return loss()(outputs, targets).mean()

    with (
        wrapped(net(), criterion=mean) as trainer,
        pytest.raises(ModelError, match="Example weights need a loss that gives one value per example"),
    ):
        trainer.step((*BATCH, np.ones(61)))


@pytest.mark.parametrize(
    "use", [lambda trainer: trainer.step(BATCH), lambda trainer: trainer.evaluate(BATCH), lambda trainer: trainer(X)]
)
def test_a_graph_with_static_shape(use):
    block = net()
    with wrapped(block, devices=2) as trainer:
        trainer.step(BATCH)
        before = trainer.digest()
        block[3].hybridize(static_alloc=True, static_shape=True)
        with pytest.raises(ModelError, match=r"static_shape=True, which is not .* Use net.hybridize\(static_alloc"):
            use(trainer)
        assert trainer.digest() == before
        block.hybridize(static_alloc=True)
        use(trainer)


def test_inputs_that_the_block_does_not_take():
    block = nn.Dense(10)
    block.initialize()
    with (
        wrapped(block) as trainer,
        pytest.raises(ModelError, match=r"inputs y, .* Dense's forward function takes x"),
    ):
        trainer.step(({"y": X}, Y))


def line():
    """No rectifier: oneDNN's makes zeros out of NaN."""
    mx.random.seed(3)
    made = nn.HybridSequential()
    made.add(nn.BatchNorm(), nn.Flatten(), nn.Dropout(0.2), nn.Dense(10))
    made.initialize()
    return made


@pytest.mark.parametrize("devices", [1, 3])
def test_a_loss_that_is_no_number_names_step_and_shard_and_changes_nothing(devices):
    block = line()
    with wrapped(block, devices=devices) as trainer:
        trainer.step(BATCH)
        before, digest = weights(block), trainer.digest()
        bad = X.copy()
        bad[20] = np.nan  # in shard 2: 61 in 8 shards are 8, 8, 8 ...
        with pytest.raises(NonFiniteError, match=r"The loss is nan in step 1, shard 2. The model is as it was"):
            trainer.step((bad, Y))
        assert trainer.digest() == digest
        assert all(before[name].tobytes() == value.tobytes() for name, value in weights(block).items())
        trainer.step(BATCH)
        after = trainer.digest()
    with wrapped(line(), devices=1) as trainer:
        trainer.step(BATCH)
        trainer.step(BATCH)
        assert trainer.digest() == after


def test_precision_is_not_supported():
    with pytest.raises(PlanError, match=r"precision='fp16' is not supported with MXNet, .* Use net.cast"):
        wrapped(net(), precision="fp16")


def test_a_state_before_there_are_shapes():
    with wrapped(net()) as trainer, pytest.raises(ModelError, match=r"'0.weight' gets its shape from the first batch"):
        trainer.digest()


def test_a_state_of_another_optimizer():
    with wrapped(net(), "adam") as trainer:
        trainer.step(BATCH)
        state = trainer.state()
    block = net()
    with wrapped(block) as trainer:
        trainer.step(BATCH)
        before = trainer.digest()
        with pytest.raises(StateError, match=r"does not fit this optimizer: '0.weight.1' is not in the optimizer"):
            trainer.load_state(state)
        assert trainer.digest() == before


def test_an_error_of_the_blocks_own_names_the_shard():
    class Odd(gluon.Block):
        def forward(self, x):
            raise RuntimeError("odd")

    block = nn.Sequential()
    block.add(nn.Dense(10, in_units=144), Odd())
    block.initialize()
    with wrapped(block) as trainer:
        with pytest.raises(RuntimeError, match="odd") as caught:
            trainer.step(BATCH)
        assert "In shard 0 of step 0." in caught.value.__notes__


@pytest.mark.parametrize("setting", ["MXNET_CPU_WORKER_NTHREADS=3", "MXNET_ENGINE_TYPE=ThreadedEngine"])
def test_an_engine_with_several_threads_for_a_context(setting, monkeypatch):
    monkeypatch.setenv(*setting.split("="))
    with pytest.raises(ExactError, match=f"With {setting} several threads of MXNet's engine compute for one context"):
        wrapped(net())
    wrapped(net(), exact=False).close()


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("variables", "signs"),
    [
        ({**TORCHRUN, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, "RANK=1, WORLD_SIZE=2"),
        (
            {**SRUN, "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "node3", "SLURM_JOB_ID": "7"},
            "SLURM_PROCID=1, SLURM_STEP_ID=0",
        ),
    ],
    ids=["torchrun", "srun"],
)
def test_a_launcher(variables, signs, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        wrapped(net())
    assert str(caught.value) == (
        f"This process was launched as one of several ({signs}), but this framework uses all devices from one process "
        "and cannot join other processes. Start the script with python alone, or unset the variables of the launcher."
    )
