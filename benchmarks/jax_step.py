"""Measures a JAX step of Lockstep against a hand-written one: `python benchmarks/jax_step.py lenet`.

By hand means what JAX's own guide shows: one `jit` over a batch that is spread over
the devices with `NamedSharding`. All sides live in one process with the same
devices and take turns, some steps each, so that whatever the machine does meanwhile
happens to all of them.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "64")  # what Lockstep sets, for all sides

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import lockstep

LOSS = optax.softmax_cross_entropy_with_integer_labels


class LeNet(nn.Module):
    """LeNet-5 for 28×28 images."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.max_pool(nn.relu(nn.Conv(6, (5, 5))(x)), (2, 2), (2, 2))
        x = nn.max_pool(nn.relu(nn.Conv(16, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class Basic(nn.Module):
    """ResNet's basic block."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        def norm(y: Any) -> Any:
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)

        y = nn.relu(norm(nn.Conv(self.width, (3, 3), self.stride, use_bias=False)(x)))
        y = norm(nn.Conv(self.width, (3, 3), use_bias=False)(y))
        if self.stride > 1:
            x = norm(nn.Conv(self.width, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """ResNet-18 with a 3×3 stem and no pooling before the end."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Conv(64, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for stage in range(4):
            for block in range(2):
                x = Basic(64 << stage, 2 if stage and not block else 1)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


class Arrays(nn.Module):
    """As many arrays as ResNet-18 has, of one number each: a step that is nearly all the host's."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        scale = sum(self.param(f"scale{index}", nn.initializers.ones, ()) for index in range(60))
        for index in range(40):
            mean = self.variable("batch_stats", f"mean{index}", jnp.zeros, ())
            mean.value = 0.9 * mean.value + 0.1 * x.mean()
        return nn.Dense(10)(x.reshape(len(x), -1)) * scale


# module, batch size, steps in a turn
MODELS = {"lenet": (LeNet, 256, 5), "resnet18": (ResNet18, 64, 1), "arrays": (Arrays, 4, 50)}


def by_hand(module: nn.Module, variables: Any, devices: list[Any], bf16: bool) -> Callable[[Any, Any], None]:
    """One jitted step over a spread batch."""
    mesh = Mesh(np.array(devices), ("batch",))
    whole, spread = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("batch"))
    tx = optax.sgd(0.05, momentum=0.9)
    rest = {name: value for name, value in variables.items() if name != "params"}
    held = jax.device_put((variables["params"], rest, tx.init(variables["params"])), whole, may_alias=False)
    short = (lambda tree: jax.tree.map(lambda v: v.astype(jnp.bfloat16), tree)) if bf16 else (lambda tree: tree)

    def step(params: Any, rest: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            outputs, kept = module.apply({"params": short(params), **rest}, short(x), mutable=list(rest))
            return LOSS(outputs.astype(jnp.float32), y).mean(), kept

        (value, kept), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), kept, state, value

    run = jax.jit(step, donate_argnums=(0, 1, 2))

    def once(x: Any, y: Any) -> None:
        nonlocal held
        *kept, value = run(*held, *jax.device_put((x, y), spread))
        held = kept
        float(value)

    return once


def ours(module: nn.Module, variables: Any, devices: int | None, shards: int | None, bf16: bool) -> Any:
    """Lockstep's step."""
    trainer = lockstep.wrap(
        (module, variables),
        optax.sgd(0.05, momentum=0.9),
        LOSS,
        devices=devices,
        shards=shards,
        precision="bf16" if bf16 else None,
    )
    return lambda x, y: trainer.step((x, y))["loss"]


def main() -> None:
    """Prints milliseconds a step and ratios, medians over turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, help="in a turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--bf16", action="store_true")
    chosen = parser.parse_args()
    make, batch, steps = MODELS[chosen.model]
    batch, steps = chosen.batch or batch, chosen.steps or steps
    accelerated = bool(lockstep.backends.choose.module("lockstep.backends.jax").available())
    if not accelerated:
        jax.config.update("jax_num_cpu_devices", max(8, chosen.devices))
    generator = np.random.Generator(np.random.PCG64(0))
    x = generator.standard_normal((batch, 28, 28, 1), np.float32)
    y = generator.integers(0, 10, batch).astype(np.int32)
    module = make()
    variables = jax.jit(module.init)(jax.random.key(0), x[:2])
    sides = {
        "by hand": by_hand(module, variables, jax.devices()[: chosen.devices], chosen.bf16),
        f"{chosen.devices} shards": ours(module, variables, chosen.devices, chosen.devices, chosen.bf16),
        "default shards": ours(module, variables, chosen.devices, None, chosen.bf16),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name, side in sides.items():
        started = time.perf_counter()
        side(x, y)
        print(f"{name}: first step {time.perf_counter() - started:.1f} s", flush=True)
    for index in range(chosen.turns):
        for name in list(sides)[:: -1 if index % 2 else 1]:
            started = time.perf_counter()
            for _ in range(steps):
                sides[name](x, y)
            times[name].append(1000 * (time.perf_counter() - started) / steps)
    print(
        f"{chosen.model}, batch {batch}, {chosen.devices} devices ({jax.devices()[0].device_kind}), "
        f"jax {jax.__version__}"
    )
    for name, values in times.items():
        ratio = statistics.median(one / other for one, other in zip(values, times["by hand"], strict=True))
        print(f"{name:16} {statistics.median(values):9.2f} ms  {ratio:.2f}x  (least {min(values):.2f} ms)")


if __name__ == "__main__":
    main()
