"""Compare TensorFlow's own ways and Lockstep: `python benchmarks/tensorflow_step.py`, less than four minutes.

Plain is one `tf.function` around a step, or Keras's own `fit`, on one device. TensorFlow's data parallelism is what its
guide shows: one `tf.function` around `strategy.run` on two logical CPUs, in which MirroredStrategy adds the gradients.
A step begins with the batch as NumPy arrays. Keras's `fit` is not charged for the beginning and end of its epochs.
"""

import sys
from functools import partial

from compare import Entry, Framework, lockstep_entries, main
from peers import Way, serve
from timing import StepClock, time_steps
from ways import images, lockstep_ways, serve_arguments, shuffled_batches

SHAPE = 28, 28, 1
TITLES = {"mlp": "MLP 784-256-256-10", "lenet": "LeNet 20-50-128-10", "resnet18": "ResNet-18, 28×28×1"}
BATCH_SIZES = {"mlp": 256, "lenet": 256, "resnet18": 64}


def entries(name: str) -> list[Entry]:
    """Return the contenders for one model."""
    return [
        Entry("plain `tf.function`, 1 device", "plain", [["--serve", "function", name]]),
        Entry("plain Keras `fit`, 1 device", "plain", [["--serve", "keras", name]], ("fit",)),
        Entry("MirroredStrategy, 2 devices", "own", [["--serve", "mirrored", name]]),
        *lockstep_entries(name, BATCH_SIZES[name]),
    ]


def model(name):
    import keras
    from keras import layers

    def convolution(x, channels, size, stride):
        x = layers.Conv2D(channels, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    def residual(x, channels, stride):
        short = x if stride == 1 and x.shape[-1] == channels else convolution(x, channels, 1, stride)
        y = convolution(layers.ReLU()(convolution(x, channels, 3, stride)), channels, 3, 1)
        return layers.ReLU()(layers.Add()([short, y]))

    keras.utils.set_random_seed(0)
    x = start = keras.Input(SHAPE)
    if name == "mlp":
        x = layers.Flatten()(x)
        for _ in range(2):
            x = layers.Dense(256, activation="relu")(x)
    elif name == "lenet":
        x = layers.AveragePooling2D(2)(layers.Conv2D(20, 3, activation="relu")(x))
        x = layers.AveragePooling2D(2)(layers.Conv2D(50, 5, activation="relu")(x))
        x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    else:
        x = layers.ReLU()(convolution(x, 64, 3, 1))
        for channels, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            x = residual(x, channels, stride)
        x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(start, layers.Dense(10)(x))


def sgd():
    import keras

    return keras.optimizers.SGD(0.01, 0.9)


def compiled(name):
    """Return the model with optimizer, loss and metric."""
    import keras

    net = model(name)
    net.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return net


def with_function(name: str, mirrored: bool) -> dict[str, Way]:
    """Return one `tf.function`, under MirroredStrategy or without a strategy."""
    import contextlib

    import tensorflow as tf

    strategy = None
    if mirrored:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        assert strategy.num_replicas_in_sync == 2
    with strategy.scope() if strategy else contextlib.nullcontext():
        net, optimizer = model(name), sgd()
        optimizer.build(net.trainable_variables)
    batch_size = BATCH_SIZES[name]
    half = batch_size // 2
    source = shuffled_batches(images(SHAPE), batch_size)
    sums = [0.0, 0]

    def one(x, y):
        with tf.GradientTape() as tape:
            outputs = net(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)
            loss = tf.reduce_sum(losses) / batch_size
        gradients = tape.gradient(loss, [variable.value for variable in net.trainable_variables])
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss, tf.math.count_nonzero(tf.argmax(outputs, 1, tf.int32) == y)

    @tf.function
    def train(x, y):
        if strategy is None:
            return one(x, y)
        return [strategy.reduce("SUM", each, axis=None) for each in strategy.run(one, args=(x, y))]

    def spread(array):
        def rows(context):
            index = context.replica_id_in_sync_group
            return tf.convert_to_tensor(array[half * index : half * (index + 1)])

        return strategy.experimental_distribute_values_from_function(rows)

    def step() -> None:
        batch = next(source)
        give = spread if strategy else tf.convert_to_tensor
        loss, hits = train(*map(give, batch))
        sums[0] += float(loss)
        sums[1] += int(hits)

    return {"step": partial(time_steps, step, lambda: None)}


def with_keras(name: str) -> dict[str, Way]:
    """Return Keras's own `fit` over arrays."""
    import keras

    net, clock = compiled(name), StepClock()
    x, y = images(SHAPE)

    class Marks(keras.callbacks.Callback):
        enough = 0

        def on_epoch_begin(self, epoch, logs=None):
            clock.restart()

        def on_train_batch_end(self, batch, logs=None):
            clock.mark()
            if len(clock.seconds) >= self.enough:
                self.model.stop_training = True

    def fit(warm: int, count: int) -> list[float]:
        marks = Marks()
        marks.enough = warm + count
        net.fit(x, y, batch_size=BATCH_SIZES[name], epochs=1_000_000, callbacks=[marks], verbose=0)
        return clock.take(count)

    return {"fit": fit}


def with_lockstep(name: str, devices: int | None, shards: int | None, expected: list[int]) -> dict[str, Way]:
    """Return the ways to train with Lockstep."""
    import lockstep

    trainer = lockstep.wrap(compiled(name), devices=devices, shards=shards)
    arrays, batch_size = images(SHAPE), BATCH_SIZES[name]
    return lockstep_ways(trainer, arrays, shuffled_batches(arrays, batch_size), batch_size, expected)


def serve_one() -> None:
    """Be a peer."""
    asked = serve_arguments()
    if asked.serve == "lockstep":
        serve(with_lockstep(asked.model, asked.devices, asked.shards, asked.expect))
    elif asked.serve == "keras":
        serve(with_keras(asked.model))
    else:
        serve(with_function(asked.model, asked.serve == "mirrored"))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve_one()
    else:
        main(
            Framework(
                name="tensorflow",
                title="TensorFlow: tf.function, Keras, MirroredStrategy and Lockstep",
                script=__file__,
                own_way="MirroredStrategy",
                packages=("tensorflow-cpu", "keras", "numpy"),
                titles=TITLES,
                batch_sizes=BATCH_SIZES,
                entries=entries,
                default_models=("mlp", "lenet", "resnet18"),
                default_rounds=6,
            )
        )
