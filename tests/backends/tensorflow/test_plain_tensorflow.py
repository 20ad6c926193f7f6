"""Plain TensorFlow: unsupported models and data, datasets, replicas, traces and versions."""

import contextlib
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import lockstep
from lockstep.backends import tensorflow as module
from lockstep.backends.base import Recipe
from lockstep.backends.tensorflow import loaders, parallel_call, settings
from lockstep.core.fold import Fold
from lockstep.core.options import Options
from lockstep.core.plan import Plan
from lockstep.core.types import Work
from lockstep.errors import BatchError, ExactError, ModelError, OptimizerError

X = np.random.Generator(np.random.PCG64(1)).standard_normal((20, 4)).astype("float32")
Y = np.arange(20) % 3


def variables():
    return tf.Variable(np.ones((4, 3), "float32")), tf.Variable(np.zeros(3, "float32"))


def wrap(function, own_variables, **options):
    return lockstep.wrap(
        (function, list(own_variables)), keras.optimizers.SGD(0.1), "cross_entropy", shards=2, **options
    )


def test_a_stateful_random_operation_is_refused():
    w, b = variables()
    with (
        wrap(lambda x: tf.nn.dropout(x @ w + b, 0.5, seed=1), (w, b)) as trainer,
        pytest.raises(
            ExactError, match=r"(?s)uses .*, whose result depends on earlier random operations.*stateless_dropout"
        ),
    ):
        trainer.step((X, Y))


def test_a_function_that_writes_to_its_variables_is_refused():
    w, b = variables()

    def net(x):
        b.assign_add(tf.ones(3))
        return x @ w + b

    with (
        wrap(net, (w, b)) as trainer,
        pytest.raises(ModelError, match=r"writes to a variable \(Assign.*Return the value"),
    ):
        trainer.step((X, Y))
    assert not b.numpy().any()


@pytest.mark.parametrize("devices", [1, 2])
def test_unused_variables_do_not_change_and_the_script_can_write_to_variables(devices):
    w, b = tf.Variable(X[:4, :3] * 5), variables()[1]
    unused = tf.Variable(np.ones(2, "float32"))
    with wrap(lambda x: x @ w + b, (w, b, unused), devices=devices) as trainer:
        trainer.step((X, Y))
        w.assign(tf.ones_like(w))
        b.assign(tf.zeros_like(b))
        again = trainer.step((X, Y))["loss"]
    assert again == pytest.approx(np.log(3), rel=1e-5)
    assert unused.numpy().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("model", "optimizer", "error", "message"),
    [
        ("function", "sgd", OptimizerError, "TensorFlow variables need a Keras optimizer. Got str"),
        ("frozen", None, ModelError, "but none of the model's 1 variables is trainable"),
        ("mixed", None, ModelError, "model must be a function and a list of tf.Variables"),
    ],
)
def test_unsupported_models_are_refused(model, optimizer, error, message):
    w, b = variables()
    models = {
        "function": (lambda x: x @ w + b, [w, b]),
        "frozen": (lambda x: x, [tf.Variable(1.0, trainable=False)]),
        "mixed": (lambda x: x, [w, 3]),
    }
    with pytest.raises(error, match=message):
        lockstep.wrap(models[model], optimizer or keras.optimizers.SGD(0.1), "cross_entropy")


def test_a_precision_is_refused():
    w, b = variables()
    with pytest.raises(
        ModelError, match=r"precision='bf16' is not supported for .* Leave precision out, and use tf\.cast"
    ):
        wrap(lambda x: x @ w + b, (w, b), precision="bf16")


DATA = tf.data.Dataset.from_tensor_slices((X, Y))


@pytest.mark.parametrize(
    ("data", "batch_size", "steps", "endless"),
    [
        (DATA, 6, 4, False),
        (DATA.batch(8), 8, 3, False),
        (DATA.batch(8).map(lambda x, y: (x, y)).prefetch(1), 8, 3, False),
        (DATA.batch(8, drop_remainder=True), 8, 2, False),
        (DATA.batch(8).repeat(), 8, None, True),
        (DATA.batch(8).unbatch(), 6, None, False),
    ],
)
def test_datasets_batched_or_not(data, batch_size, steps, endless):
    source = loaders.make_source(data, 6)
    assert (source.batch_size, source.num_steps, source.endless) == (batch_size, steps, endless)
    first = next(source.epoch(0))
    assert [len(part) for part in first] == [batch_size] * 2
    assert all(isinstance(part, np.ndarray) for part in first)


def labels(batches):
    return [batch[1].tolist() for batch in batches]


def test_a_dataset_that_reshuffles_gives_the_same_epoch_again():
    def source():
        return loaders.make_source(DATA.shuffle(20, seed=5).batch(8), 8)

    first = source()
    epochs = [labels(first.epoch(index)) for index in range(3)]
    assert epochs[0] != epochs[1]
    assert labels(source().epoch(2, start=1)) == epochs[2][1:]


def test_an_unseeded_dataset_cannot_be_resumed():
    tf.random.set_seed(None)
    source = loaders.make_source(DATA.shuffle(20).batch(8), 8)
    assert len(labels(source.epoch(0))) == 3
    assert len(labels(source.epoch(1))) == 3
    with pytest.raises(ExactError, match=r"in another order each time it is read, and its shuffle has no seed.*seed=0"):
        loaders.make_source(DATA.shuffle(20).batch(8), 8).epoch(0, start=2)


def test_a_dataset_with_elements_of_unknown_rank_is_refused():
    data = tf.data.Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec(None))
    with pytest.raises(BatchError, match="elements have an unknown number of axes"):
        loaders.make_source(data, 8)


def test_a_dataset_of_ragged_tensors_is_refused():
    data = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1.0], [2.0, 3.0]])).batch(2)
    with pytest.raises(BatchError, match=r"has a RaggedTensor, but Lockstep only splits dense arrays\. Use"):
        next(loaders.make_source(data, 2).epoch(0))


@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_names_its_shard_and_leaves_the_state(devices):
    w, b = variables()
    x = X.copy()
    x[15] = np.inf  # the second shard's
    with wrap(lambda x: tf.debugging.check_numerics(x, "here") @ w + b, (w, b), devices=devices) as trainer:
        before = trainer.digest()
        with pytest.raises(tf.errors.InvalidArgumentError, match="here") as caught:
            trainer.step((x, Y))
        assert caught.value.__notes__ == ["In shard 1 of step 0."]
        assert trainer.digest() == before


def test_replicas_run_in_parallel_and_their_shards_in_turn_and_none_is_inlined():
    attributes = parallel_call.NOT_INLINED
    body = tf.function(lambda variables, piece, row: variables[0] * piece + row, experimental_attributes=attributes)
    replica = parallel_call.ReplicaCalls(contextlib.nullcontext, [tf.Variable(3.0)], [body, body])
    pieces, rows = [tf.constant(1.0)] * 4, tf.constant([0.0, 1.0, 2.0, 3.0])
    call = parallel_call.build_call([replica, replica], pieces, rows)
    shards = [operation for operation in call.graph.get_operations() if operation.type == "StatefulPartitionedCall"]
    assert [each.control_inputs for each in shards] == [[], [shards[0]], [], [shards[2]]]
    with context.collect_graphs(optimized=True) as graphs:
        call(pieces, rows)
    kinds = [node.op for node in graphs[0].node]
    assert kinds.count("StatefulPartitionedCall") == 4
    assert set(kinds) <= {"StatefulPartitionedCall", "Unpack", "_Arg", "_Retval", "Identity", "NoOp"}


def test_freezing_and_unfreezing_again_does_not_trace_again():
    traced = []

    class Layer(keras.layers.Dense):
        def call(self, x):
            traced.append("shard")
            return super().call(x)

    class Optimizer(keras.optimizers.SGD):
        def apply(self, gradients, variables):
            traced.append("update")
            super().apply(gradients, variables)

    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Layer(3)])
    counts = []
    with lockstep.wrap(net, Optimizer(0.1), "sparse_categorical_crossentropy", shards=2) as trainer:
        for trainable in (True, False, True, False):
            net.layers[0].trainable = trainable
            before = net.layers[0].kernel.numpy()
            trainer.step((X, Y))
            assert trainable == (net.layers[0].kernel.numpy() != before).any()
            counts.append((traced.count("shard"), traced.count("update")))
    assert counts[1] == counts[2] == counts[3]
    assert [updates for _, updates in counts] == [1, 2, 2, 2]


def test_replicas_on_other_devices_have_the_script_s_values(monkeypatch):
    """Without a GPU, TensorFlow puts both replicas on the CPU; they still have separate variables."""
    monkeypatch.setattr(settings, "read_versions", lambda device: {})  # there is no GPU to describe
    w, b = variables()
    recipe = Recipe((lambda x: x @ w + b, [w, b]), keras.optimizers.SGD(0.1), "cross_entropy", (), Options())
    backend = module.open(recipe, ["gpu:0", "gpu:1"])
    w.assign(X[:4, :3])

    def compute_leaves():
        pieces = {0: {0: (X[:10], Y[:10])}, 1: {1: (X[:10], Y[:10])}}
        task = Work(pieces, 20, 2, tf.config.threading.get_intra_op_parallelism_threads() or 1, 0, 0)
        with settings.make_deterministic(task, exact=False):
            layout = backend.layout()
            fold = Fold(
                Plan.even(2, range(2)),
                pieces,
                lambda replica, slot, shard: backend.create_buffer(layout, None),
                backend.add,
            )
            partial_sums, _ = backend.partial_sums(task, fold)
        return [leaf["float32"].tobytes() for _, leaf in sorted(partial_sums.items())]

    first = compute_leaves()
    w.assign(X[4:8, :3])
    second = compute_leaves()
    assert first[0] == first[1] != second[0] == second[1]
    assert [copy["model.0"].data.tobytes() for copy in backend.copies()] == [w.numpy().tobytes()] * 2
    first, second = backend._shards.variables.synchronize(backend._list_variables())
    assert first.trainable[0] is w
    assert second.trainable[0] is not w


def test_a_loss_scale_may_change_between_steps():
    """A shard multiplies by the scale and the update divides by it: both use the scale of the step."""
    found = []
    for scales in ((4.0, 4.0), (4.0, 4096.0)):
        w, b = variables()
        optimizer = keras.optimizers.SGD(0.5, loss_scale_factor=scales[0])
        with lockstep.wrap((lambda x, w=w, b=b: x @ w + b, [w, b]), optimizer, "cross_entropy", shards=2) as trainer:
            for scale in scales:
                optimizer.loss_scale_factor = scale
                trainer.step((X, Y))
        found.append(w.numpy())
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_the_loss_of_an_output_is_one_number_or_one_per_example():
    w, b = variables()

    def return_losses(count):
        return lambda x: {"loss": tf.reduce_mean(x @ w + b, 1)[:count]}

    def trainer(function):
        return lockstep.wrap((function, [w, b]), keras.optimizers.SGD(0.1), None, shards=2)

    message = r"must be one number, or one per example. Got shape \(3,\) for a shard of 10. Return its mean."
    with trainer(return_losses(3)) as short, pytest.raises(ModelError, match=message):
        short.step(X)
    expected = float(tf.reduce_mean(return_losses(None)(X)["loss"]))
    with trainer(return_losses(None)) as whole:
        assert whole.step(X)["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_versions_of_a_cpu():
    found = settings.read_versions("cpu:0")
    assert found == {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "TensorFlow's intra-op threads": str(settings.count_threads()),
        "oneDNN": "on" if settings.is_onednn_enabled() else "off",
    }


def test_onednn_is_read_from_the_environment():
    names = {"0": "off", "1": "on"}
    here = os.environ["TF_ENABLE_ONEDNN_OPTS"]
    assert settings.read_versions("cpu:0")["oneDNN"] == names.pop(here)
    ((switch, name),) = names.items()
    code = "from lockstep.backends.tensorflow import settings; print(settings.read_versions('cpu:0')['oneDNN'])"
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": switch, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == name


def test_the_versions_of_a_gpu(monkeypatch):
    """This needs no GPU: the functions of TensorFlow that describe one are replaced."""
    details = {"first": {}, "second": {"device_name": "NVIDIA H200", "compute_capability": (9, 0)}}
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: list(details))
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details.__getitem__)
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"cuda_version": "12.5.1", "cudnn_version": "9"})
    found = settings.read_versions("gpu:1")
    assert (found["device model"], found["CUDA"], found["cuDNN"]) == ("NVIDIA H200", "12.5.1", "9")
