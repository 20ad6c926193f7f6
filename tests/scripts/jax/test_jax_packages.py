"""Models of equinox and haiku, which are functions of their arrays, and flax's own MNIST example."""

import equinox as eqx
import haiku as hk
import jax
import numpy as np
import optax
from flax import nnx

import lockstep
from lockstep.backends import jax as backend
from scripts.compare import check_port

assert backend  # imported before JAX is initialized
jax.config.update("jax_num_cpu_devices", 3)

X, Y = np.random.RandomState(0).randn(24, 6).astype(np.float32), np.arange(24) % 3
LOSS = optax.softmax_cross_entropy_with_integer_labels
NEAR = 1e-5  # the plain loop compiles loss and update into one program


def read(tree):
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def train(apply, params):
    """The plain loop of a function."""
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        gradients = jax.grad(lambda params: LOSS(apply(params, X), Y).mean())(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
    return read(params)


def train_port(apply, params, devices, shards):
    with lockstep.wrap((apply, params), optax.adam(1e-2), LOSS, devices=devices, shards=shards) as trainer:
        for _ in range(3):
            trainer.step((X, Y), verbose=0)
        return read(trainer.model.variables)


def test_equinox():
    """`eqx.filter_jit` and `filter_grad` go; `partition` and the function are the two lines that the error names."""

    def start():
        model = eqx.nn.MLP(6, 3, 8, 2, key=jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_array)
        return lambda params, x: jax.vmap(eqx.combine(params, static))(x), params

    def port(devices, shards):
        function, params = start()
        with lockstep.wrap((function, params), optax.adam(1e-2), LOSS, devices=devices, shards=shards) as trainer:
            for _ in range(3):
                trainer.step((X, Y), verbose=0)
            _, static = eqx.partition(eqx.nn.MLP(6, 3, 8, 2, key=jax.random.key(0)), eqx.is_array)
            trained = eqx.combine(trainer.model.variables, static)
        np.testing.assert_allclose(jax.vmap(trained)(X), trainer.predict(X), rtol=NEAR, atol=NEAR)
        return read(eqx.filter(trained, eqx.is_array))

    check_port(lambda: train(*start()), port, NEAR)


def test_haiku():
    """`wrap` of the function, with the line that the error names if something is drawn."""
    network = hk.transform(lambda x: hk.nets.MLP([8, 3])(x))
    keyless = hk.without_apply_rng(network)

    def start():
        return keyless.apply, network.init(jax.random.key(0), X)

    check_port(lambda: train(*start()), lambda devices, shards: train_port(*start(), devices, shards), NEAR)

    def port(devices, shards):
        apply = lambda params, x, *, rngs: network.apply(params, rngs["dropout"], x)  # noqa: E731
        return train_port(apply, start()[1], devices, shards)

    check_port(lambda: train(*start()), port, NEAR)


class CNN(nnx.Module):
    """Flax's MNIST example, smaller: `__call__` gets the streams of random numbers, which evaluation does not need."""

    def __init__(self, rngs):
        self.first = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.0)
        self.last = nnx.Linear(4 * 16, 3, rngs=rngs)

    def __call__(self, x, rngs):
        x = nnx.avg_pool(nnx.relu(self.norm(self.first(x))), window_shape=(2, 2), strides=(2, 2))
        return self.last(self.dropout(x.reshape(x.shape[0], -1), rngs=rngs))


def test_flax_mnist():
    """`train_step` goes, and with it `rngs`; `wrap` and `step` come."""
    images = np.random.RandomState(0).randn(24, 8, 8, 1).astype(np.float32)

    def plain():
        model, rngs = CNN(nnx.Rngs(0)), nnx.Rngs(1)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        @nnx.jit
        def train_step(model, optimizer, rngs):
            gradients = nnx.grad(lambda model: LOSS(model(images, rngs), Y).mean())(model)
            optimizer.update(model, gradients)

        for _ in range(3):
            train_step(model, optimizer, rngs)
        return read(nnx.as_pure(nnx.state(model)))

    def port(devices, shards):
        model = CNN(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        with lockstep.wrap(model, optimizer, LOSS, devices=devices, shards=shards) as trainer:
            for _ in range(3):
                trainer.step((images, Y), verbose=0)
        return read(nnx.as_pure(nnx.state(model)))

    check_port(plain, port, NEAR)
