"""JAX models for the parity runs, in each of the forms that `wrap` takes."""

import os
from functools import partial

os.environ.setdefault("NPROC", "64")  # as Lockstep sets it; here before JAX wakes, for all tests of this process

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import lockstep

if not jax._src.xla_bridge.backends_are_initialized():
    jax.config.update("jax_num_cpu_devices", 8)


def drawn(key, shape, dtype=jnp.float32, *_, **__):
    """First weights by numpy: XLA compiles each shape of a draw for seconds."""
    generator = np.random.Generator(np.random.PCG64(shape))
    return jnp.asarray(generator.standard_normal(shape) / np.sqrt(np.prod(shape[:-1])), dtype)


class MLP(nnx.Module):
    """97 features, which do not divide by any vector's width."""

    def __init__(self, rngs):
        self.first = nnx.Linear(97, 33, kernel_init=drawn, rngs=rngs)
        self.second = nnx.Linear(33, 17, kernel_init=drawn, rngs=rngs)
        self.last = nnx.Linear(17, 10, kernel_init=drawn, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.second(nnx.relu(self.first(x)))))


class LeNet(nn.Module):
    """LeNet-5 for 16×16 images, with dropout."""

    @nn.compact
    def __call__(self, x, train: bool):
        for width in (6, 16):
            x = nn.max_pool(nn.relu(nn.Conv(width, (5, 5), kernel_init=drawn)(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(120, kernel_init=drawn)(x.reshape(len(x), -1)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.relu(nn.Dense(84, kernel_init=drawn)(x))
        return nn.Dense(10, kernel_init=drawn)(nn.Dropout(0.25, deterministic=not train)(x))


class Basic(nn.Module):
    """ResNet's basic block."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train: bool):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        convolution = partial(nn.Conv, self.width, use_bias=False, kernel_init=drawn)
        y = nn.relu(norm()(convolution((3, 3), self.stride)(x)))
        y = norm()(convolution((3, 3))(y))
        if self.stride > 1:
            x = norm()(convolution((1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """ResNet-18 with a 3×3 stem, `width` channels in its first stage."""

    width: int

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Conv(self.width, (3, 3), use_bias=False, kernel_init=drawn)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for stage in range(4):
            for block in range(2):
                x = Basic(self.width << stage, 2 if stage and not block else 1)(x, train)
        return nn.Dense(10, kernel_init=drawn)(x.mean((1, 2)))


class State(TrainState):
    """A train state with batch norm's statistics, as flax's own examples have it."""

    batch_stats: object = None


def mlp(devices, **more):
    """An nnx module with an nnx.Optimizer."""
    model = MLP(nnx.Rngs(7))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    return lockstep.wrap(
        model, optimizer, "cross_entropy", metrics=["accuracy", "top5"], devices=devices, clip_norm=1.0, **more
    )


def lenet(devices, **more):
    """A linen module without variables, a schedule, and weight decay, which needs the parameters."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, 20), weight_decay=0.01)
    loss = optax.softmax_cross_entropy_with_integer_labels
    return lockstep.wrap(LeNet(), optimizer, loss, metrics=["accuracy"], devices=devices, **more)


def resnet(devices, **more):
    """A TrainState."""
    module = ResNet18(width=4)
    variables = first(jax.eval_shape(module.init, jax.random.key(8), jnp.zeros((2, 12, 12, 1))))
    tx = optax.sgd(0.05, momentum=0.9)
    state = State.create(apply_fn=module.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"])
    return lockstep.wrap(state, None, "cross_entropy", metrics=["accuracy"], devices=devices, **more)


def first(forms):
    """What `init` gives a network of convolutions and batch norm, without a hundred compilations."""

    def value(path, form):
        ones = path[-1].key in ("scale", "var")
        return drawn(None, form.shape) if path[-1].key == "kernel" else jnp.full(form.shape, float(ones))

    return jax.tree_util.tree_map_with_path(value, forms)


GENERATOR = np.random.Generator(np.random.PCG64(20))


def features(count):
    """Random examples for the MLP."""
    return GENERATOR.standard_normal((count, 97), np.float32), GENERATOR.integers(0, 10, count)


def images(count, size=16):
    """Random examples for LeNet."""
    return GENERATOR.standard_normal((count, size, size, 1), np.float32), GENERATOR.integers(0, 10, count)


def small_images(count):
    """Random examples for ResNet-18."""
    return images(count, 12)
