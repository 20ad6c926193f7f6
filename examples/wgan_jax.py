"""Two optimizers in JAX: a Wasserstein GAN with gradient penalty, one module of two halves and two trainers.

Each trainer's optimizer updates one half: `optax.masked` leaves the other alone. What one trainer has updated the other
one sees in its next step.
"""

import jax
import numpy as np
import optax
from flax import nnx
from jax import numpy as jnp

import lockstep
from lockstep.datasets import digits

NOISE, BATCH_SIZE, CRITIC_STEPS = 16, 128, 3


class Networks(nnx.Module):
    def __init__(self, rngs):
        self.generator = nnx.Sequential(nnx.Linear(NOISE, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 64, rngs=rngs))
        self.critic = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.leaky_relu, nnx.Linear(64, 1, rngs=rngs))


@lockstep.objective
def criticize(nets, batch):
    """The critic's loss: real images above drawn ones, with gradients of norm 1 in between."""
    real, drawn = batch["images"], jax.lax.stop_gradient(nnx.sigmoid(nets.generator(batch["noise"])))
    between = real + batch["share"][:, None] * (drawn - real)
    slopes = jax.grad(lambda images: nets.critic(images).sum())(between)
    penalty = (jnp.linalg.norm(slopes, axis=1) - 1) ** 2
    return (nets.critic(drawn) - nets.critic(real)).mean() + 10 * penalty.mean()


@lockstep.objective
def draw(nets, batch):
    """The generator's loss: what it draws is to be high for the critic."""
    return -nets.critic(nnx.sigmoid(nets.generator(batch["noise"]))).mean()


def update_half(name):
    """Adam for the half of that name, and nothing for the other."""

    def belongs(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == name, params)

    def others(params):
        return jax.tree.map(lambda own: not own, belongs(params))

    adam = optax.adam(1e-3, b1=0.5, b2=0.9)
    return optax.chain(optax.masked(adam, belongs), optax.masked(optax.set_to_zero(), others))


(images, _), _ = digits()
nets = Networks(nnx.Rngs(0))
critic = lockstep.wrap(nets, update_half("critic"), criticize, devices=2, shards=4)
generator = lockstep.wrap(nets, update_half("generator"), draw, devices=2, shards=4)
random = np.random.default_rng(0)
for epoch in range(4):
    for step, start in enumerate(range(0, len(images) - BATCH_SIZE, BATCH_SIZE)):
        noise = random.standard_normal((BATCH_SIZE, NOISE), np.float32)
        share = random.random(BATCH_SIZE, np.float32)
        told = critic.step({"images": images[start : start + BATCH_SIZE], "noise": noise, "share": share}, verbose=0)
        if step % CRITIC_STEPS == 0:
            generator.step({"noise": noise}, verbose=0)
    print(f"epoch {epoch + 1}: the critic's loss {told['loss']:.4f}")
print(generator.digest())
