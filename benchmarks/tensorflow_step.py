"""Measures a step of Lockstep against tf.distribute.MirroredStrategy: python benchmarks/tensorflow_step.py

By hand means what TensorFlow's guide shows: one `tf.function` around `strategy.run` on two
logical CPUs, the gradients added by the strategy, the loss by `strategy.reduce`. A step of
either side begins with the batch as numpy arrays, which it cuts and hands to TensorFlow itself,
and ends with the batch's loss as a number. Threads, model, optimizer and batch are the same.

Each side is a process of its own, as a script would be. They take turns, block by block, so
that whatever the machine does meanwhile happens to all; the ratio of a round is that of its
blocks. The time of the cores says what a step costs where the machine has other work too.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

CASES = {"lenet": (256, 20), "resnet18": (64, 2)}  # batch size, steps in a block
SIDES = {"by hand": None, "2 shards": 2, "default shards": None}


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
    return lambda: trainer.step((x, y))["loss"]


def mirrored_step(name, x, y):
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        net = model(name)
        optimizer = keras.optimizers.SGD(0.01, 0.9)
        optimizer.build(net.trainable_variables)
    half = len(x) // 2

    def given(context):
        rows = slice(half * context.replica_id_in_sync_group, half * (context.replica_id_in_sync_group + 1))
        return tf.convert_to_tensor(x[rows]), tf.convert_to_tensor(y[rows])

    def one(pair):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(pair[1], net(pair[0], training=True))
            loss = tf.reduce_sum(losses) / len(x)
        gradients = tape.gradient(loss, [variable.value for variable in net.trainable_variables])
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(pair):
        return strategy.reduce("SUM", strategy.run(one, args=(pair,)), axis=None)

    return lambda: float(step(strategy.experimental_distribute_values_from_function(given)))


def peer(side, name, threads):
    """Answers every line on standard input with the seconds that a step took, by the clock and of the cores."""
    import numpy as np
    import tensorflow as tf

    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    if side == "by hand":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    batch_size, steps = CASES[name]
    generator = np.random.Generator(np.random.PCG64(0))
    x = generator.standard_normal((batch_size, 28, 28, 1)).astype("float32")
    y = generator.integers(0, 10, batch_size)
    step = mirrored_step(name, x, y) if side == "by hand" else lockstep_step(name, x, y, SIDES[side])
    for _ in range(3):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        started, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        print((time.perf_counter() - started) / steps, (time.process_time() - busy) / steps, flush=True)


def started(side, name, threads):
    """A peer, warmed up."""
    command = [sys.executable, __file__, "--peer", side, name, "--threads", str(threads)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment)
    while (line := process.stdout.readline().strip()) != "ready":
        assert line or process.poll() is None, f"{command} has ended; run it alone to see why"
    return process


def compare(name, rounds, threads):
    """Prints a row for each side."""
    peers = {side: started(side, name, threads) for side in SIDES}
    wall, cores = ({side: [] for side in peers} for _ in range(2))
    for index in range(rounds):
        for side in list(peers)[:: -1 if index % 2 else 1]:
            peers[side].stdin.write("go\n")
            peers[side].stdin.flush()
            for times, seconds in zip((wall, cores), peers[side].stdout.readline().split(), strict=True):
                times[side].append(1000 * float(seconds))
    for process in peers.values():
        process.stdin.close()
        process.wait()
    for side in peers:
        print(f"{name:9} {CASES[name][0]:5}  {side:15}{shown(wall, side)}  {shown(cores, side)}", flush=True)


def shown(times, side):
    """The median, and the median and quartiles of the ratios to the side by hand."""
    ratios = [own / other for own, other in zip(times[side], times["by hand"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(times[side]):8.1f} ms  {middle:.2f}x ({low:.2f} to {high:.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads of every side; 0: TensorFlow's own")
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        return peer(*arguments.peer, arguments.threads)
    threads = arguments.threads or "TensorFlow's own"
    print(f"2 devices, {len(os.sched_getaffinity(0))} cores, intra-op threads: {threads}; medians (quartiles)")
    print(f"{'model':9} {'batch':5}  {'side':15}{'a step, by the clock':>34}  {'of the cores':>34}")
    for name in arguments.models.split(","):
        compare(name, arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()
