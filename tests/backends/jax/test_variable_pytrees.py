"""The variables of a function may be any pytree, and an nnx module may take its random streams in the call."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

import lockstep
from backends.kits import jax as kit

assert kit.module  # has made the CPU devices
X, Y = np.random.RandomState(0).randn(16, 6).astype(np.float32), np.arange(16) % 3


@struct.dataclass
class Layer:
    weight: object
    name: str = struct.field(pytree_node=False, default="layer")


def train(model, devices=1):
    loss = optax.softmax_cross_entropy_with_integer_labels
    with lockstep.wrap(model, optax.sgd(0.1), loss, devices=devices, shards=4) as trainer:
        losses = [trainer.step((X, Y), verbose=0)["loss"] for _ in range(2)]
        return losses, trainer.digest()


@pytest.mark.parametrize(
    ("variables", "read"),
    [
        ([None, jnp.ones((6, 3))], lambda variables: variables[1]),
        ({"a": {}, "b": jnp.ones((6, 3))}, lambda variables: variables["b"]),
        (Layer(jnp.ones((6, 3))), lambda variables: variables.weight),
        ((Layer(None), {"inner": Layer(jnp.ones((6, 3)))}), lambda variables: variables[1]["inner"].weight),
    ],
)
def test_the_framework_is_found_in_any_pytree(variables, read):
    plain, _ = train((lambda weight, x: x @ weight, jnp.ones((6, 3))))
    losses, _ = train((lambda variables, x: x @ read(variables), variables))
    assert losses == plain


class Net(nnx.Module):
    """Flax's MNIST example: `__call__` gets the streams."""

    def __init__(self, own=None):
        self.first = nnx.Linear(6, 16, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=own)
        self.last = nnx.Linear(16, 3, rngs=nnx.Rngs(1))

    def __call__(self, x, rngs):
        return self.last(self.dropout(self.first(x), rngs=rngs))


class Optional(Net):
    def __call__(self, x, rngs=None):
        return super().__call__(x, rngs)


@pytest.mark.parametrize("kind", [Net, Optional])
def test_a_call_that_takes_rngs_gets_them(kind):
    results = [train(kind(), devices) for devices in (1, 2)]
    assert results[0] == results[1]
    same_rate = lambda model: lockstep.wrap(model, optax.sgd(0.0), lambda outputs, y: outputs.std(), shards=4)  # noqa: E731
    with same_rate(kind()) as trainer:  # the parameters stay, the masks do not
        assert trainer.step((X, Y), verbose=0) != trainer.step((X, Y), verbose=0)


def test_a_module_with_streams_of_its_own_draws_from_these():
    class Plain(Net):
        def __call__(self, x):
            return super().__call__(x, None)

    assert train(Optional(nnx.Rngs(3))) == train(Plain(nnx.Rngs(3)))
