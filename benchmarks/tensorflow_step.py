"""Measures a step of Lockstep against tf.distribute.MirroredStrategy: python benchmarks/tensorflow_step.py

Each side is a process of its own. They take turns, block by block, so that whatever
the machine does meanwhile happens to both; the ratio of a round is that of its blocks. The
time of the cores says what a step costs where the machine has other work too.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

CASES = {"lenet": (256, 10), "resnet18": (32, 1)}  # batch size, steps in a block


def model(name):
    import keras
    from keras import layers

    def block(x, channels, stride):
        def conv(x, size, stride):
            x = layers.Conv2D(channels, size, stride, padding="same", use_bias=False)(x)
            return layers.BatchNormalization()(x)

        short = x if stride == 1 and x.shape[-1] == channels else conv(x, 1, stride)
        y = conv(layers.ReLU()(conv(x, 3, stride)), 3, 1)
        return layers.ReLU()(layers.Add()([short, y]))

    keras.utils.set_random_seed(0)
    start = keras.Input((28, 28, 1))
    if name == "lenet":
        x = layers.AveragePooling2D(2)(layers.Conv2D(20, 3, activation="relu")(start))
        x = layers.AveragePooling2D(2)(layers.Conv2D(50, 5, activation="relu")(x))
        x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    else:
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(64, 3, padding="same", use_bias=False)(start)))
        for channels, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            x = block(x, channels, stride)
        x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(start, layers.Dense(10)(x))


def lockstep_step(name, x, y, shards):
    import keras

    import lockstep

    net = model(name)
    net.compile(keras.optimizers.SGD(0.01, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer = lockstep.wrap(net, devices=2, shards=shards)
    return lambda: trainer.step((x, y))


def mirrored_step(name, x, y):
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        net = model(name)
        optimizer = keras.optimizers.SGD(0.01, 0.9)
        optimizer.build(net.trainable_variables)
    halves = [(x[: len(x) // 2], y[: len(y) // 2]), (x[len(x) // 2 :], y[len(y) // 2 :])]

    def given(context):
        return halves[context.replica_id_in_sync_group]

    def one(pair):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(pair[1], net(pair[0], training=True))
            loss = tf.reduce_sum(losses) / len(x)
        gradients = tape.gradient(loss, [variable.value for variable in net.trainable_variables])
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss

    values = strategy.experimental_distribute_values_from_function(given)
    step = tf.function(lambda pair: strategy.run(one, args=(pair,)))
    return lambda: step(values)


def peer(side, name, threads):
    """Answers every line on standard input with the seconds that a block took."""
    import numpy as np
    import tensorflow as tf

    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    if side == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    batch_size, steps = CASES[name]
    generator = np.random.Generator(np.random.PCG64(0))
    x = generator.standard_normal((batch_size, 28, 28, 1)).astype("float32")
    y = generator.integers(0, 10, batch_size)
    shards = None if side == "default" else 2
    step = mirrored_step(name, x, y) if side == "mirrored" else lockstep_step(name, x, y, shards)
    for _ in range(3):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        step()
        started, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        print((time.perf_counter() - started) / steps, (time.process_time() - busy) / steps, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads of either side; 0: TensorFlow's own")
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        return peer(*arguments.peer, arguments.threads)
    for name in arguments.models.split(","):
        compare(name, arguments)


def compare(name, arguments):
    sides = {}
    for side in ("lockstep", "mirrored", "default"):
        command = [sys.executable, __file__, "--peer", side, name, "--threads", str(arguments.threads)]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        pipe = subprocess.PIPE
        sides[side] = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
        )
    for side in sides.values():
        while (line := side.stdout.readline().strip()) != "ready":
            assert line or side.poll() is None, "a side has ended"
    seconds, cores = ({side: [] for side in sides} for _ in range(2))
    for index in range(arguments.rounds):
        for side in list(sides)[:: -1 if index % 2 else 1]:
            sides[side].stdin.write("go\n")
            sides[side].stdin.flush()
            wall, busy = map(float, sides[side].stdout.readline().split())
            seconds[side].append(wall)
            cores[side].append(busy)
    for side in sides.values():
        side.stdin.close()
        side.wait()
    for side, values in seconds.items():
        ratios = [own / other for own, other in zip(values, seconds["mirrored"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        label = {"default": "Lockstep, default shards", "lockstep": "Lockstep, 2 shards", "mirrored": "Mirrored"}[side]
        print(
            f"{name:9} batch {CASES[name][0]:3}  {label:25} {1000 * statistics.median(values):8.1f} ms/step  "
            f"{statistics.median(ratios):.2f}x ({low:.2f} to {high:.2f})  "
            f"{1000 * statistics.median(cores[side]):8.1f} ms of cores  "
            f"{statistics.median(cores[side]) / statistics.median(cores['mirrored']):.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
