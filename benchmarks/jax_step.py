"""Compare JAX's own ways and Lockstep: `python benchmarks/jax_step.py`, less than four minutes.

Plain is one jitted step on one device. JAX's own data parallelism is what its guide shows: one `jit` over a batch that
is spread over two CPU devices with `NamedSharding`. Both donate their state and sum up loss and accuracy on the
device. All rows let JAX run ahead by one step, as a loop does that reads its loss now and then.

`--models arrays` is a step that is nearly all the host's: as many arrays as ResNet-18 has, of one number each.
`--models shards` is one device with 1, 2, 4 and 8 shards of a small MLP's batch: what a shard costs.
"""

import sys
from functools import partial

from compare import Entry, Framework, lockstep_entries, main
from peers import Way, serve
from timing import time_steps
from ways import images, lockstep_ways, serve_arguments, shuffled_batches

SHAPE = 28, 28, 1
TITLES = {
    "mlp": "MLP 784-256-256-10",
    "lenet": "LeNet-5",
    "resnet18": "ResNet-18, 28×28×1",
    "arrays": "102 arrays of one number",
    "shards": "MLP 784-256-256-10, 1 to 8 shards on one device",
}
BATCH_SIZES = {"mlp": 256, "lenet": 256, "resnet18": 64, "arrays": 4, "shards": 128}
NUM_SHARDS = 1, 2, 4, 8  # of the model "shards"


def entries(name: str) -> list[Entry]:
    """Return the contenders for one model."""
    return [
        Entry("plain `jit`, 1 device", "plain", [["--serve", "jit", name, "--devices", "1"]]),
        Entry("`jit` over NamedSharding, 2 devices", "own", [["--serve", "jit", name, "--devices", "2"]]),
        *(map(on_one_device, NUM_SHARDS) if name == "shards" else lockstep_entries(name, BATCH_SIZES[name])),
    ]


def on_one_device(shards: int) -> Entry:
    """Return Lockstep on one device, with this many shards of the model "shards"."""
    arguments = [
        "--serve",
        "lockstep",
        "shards",
        "--devices",
        "1",
        "--shards",
        str(shards),
        "--expect",
        "1",
        str(shards),
    ]
    return Entry(f"Lockstep, 1 device, {shards} shard{'s' * (shards > 1)}", "lockstep", [arguments])


def optimizer_and_loss(name: str):
    """Return what all train with."""
    import optax

    return optax.sgd(1e-6 if name == "arrays" else 0.01, momentum=0.9), optax.softmax_cross_entropy_with_integer_labels


def jitted(name: str, num_devices: int) -> dict[str, Way]:
    """Return one jitted step, over a batch that is spread where there are several devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as Spec
    from jax_models import MODULES

    if num_devices > 1:
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices()[:num_devices]
    assert len(devices) == num_devices
    module = MODULES[name]()
    tx, criterion = optimizer_and_loss(name)
    source = shuffled_batches(images(SHAPE), BATCH_SIZES[name])
    variables = dict(jax.jit(module.init)(jax.random.key(0), next(source)[0][:2]))
    params = variables.pop("params")
    held = (params, variables, tx.init(params), (jnp.zeros(()), jnp.zeros((), jnp.int32)))
    mesh = Mesh(np.array(devices), ("batch",))
    whole, spread = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("batch"))
    if num_devices > 1:
        held = jax.device_put(held, whole, may_alias=False)

    @partial(jax.jit, donate_argnums=0)
    def train(held, x, y):
        params, rest, state, (losses, hits) = held

        def loss(params):
            outputs, rest_after = module.apply({"params": params, **rest}, x, mutable=list(rest))
            return criterion(outputs, y).mean(), (outputs, rest_after)

        (value, (outputs, rest)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(gradients, state, params)
        sums = losses + value, hits + (outputs.argmax(-1) == y).sum()
        return (optax.apply_updates(params, updates), rest, state, sums), value

    before = None

    def step() -> None:
        nonlocal held, before
        batch = next(source)
        if num_devices > 1:
            batch = jax.device_put(batch, spread)
        held, value = train(held, *batch)
        if before is not None:
            before.block_until_ready()
        before = value

    def finish() -> None:
        jax.block_until_ready(held)
        float(held[3][0]), int(held[3][1])

    return {"step": partial(time_steps, step, finish)}


def with_lockstep(name: str, devices: int | None, shards: int | None, expected: list[int]) -> dict[str, Way]:
    """Return the ways to train with Lockstep."""
    from jax_models import MODULES

    import lockstep

    trainer = lockstep.wrap(
        MODULES[name](), *optimizer_and_loss(name), metrics=["accuracy"], devices=devices, shards=shards
    )
    arrays, batch_size = images(SHAPE), BATCH_SIZES[name]
    return lockstep_ways(trainer, arrays, shuffled_batches(arrays, batch_size), batch_size, expected)


def serve_one() -> None:
    """Be a peer."""
    asked = serve_arguments()
    if asked.serve == "lockstep":
        serve(with_lockstep(asked.model, asked.devices, asked.shards, asked.expect))
    else:
        serve(jitted(asked.model, asked.devices))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve_one()
    else:
        main(
            Framework(
                name="jax",
                title="JAX: one jit, NamedSharding and Lockstep",
                script=__file__,
                own_way="NamedSharding",
                packages=("jax", "jaxlib", "flax", "optax", "numpy"),
                titles=TITLES,
                batch_sizes=BATCH_SIZES,
                entries=entries,
                default_models=("mlp", "lenet", "resnet18"),
                default_rounds=6,
            )
        )
