"""The calls for one batch on JAX are those on the page docs/design/walk.md."""

import numpy as np
import optax
from flax import nnx

import lockstep
from docs import walk
from lockstep.backends.jax.compile_cache import CompiledProgram


def loss(outputs, targets):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def test_jax(monkeypatch):
    frames = []
    call = CompiledProgram.__call__

    def recorded(program, *arguments):
        frames.append([*walk.on_the_stack(), ("backends/jax/compile_cache.py", "CompiledProgram.__call__")])
        return call(program, *arguments)

    net = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
    with lockstep.wrap(net, optimizer, loss, devices=["cpu:0", "cpu:1"], shards=4) as trainer:
        assert len(trainer.devices) == 2
        batch = np.ones((32, 4), "float32"), np.arange(32) % 3
        trainer.step(batch)  # traces
        monkeypatch.setattr(CompiledProgram, "__call__", recorded)
        trainer.fit(batch, batch_size=32, verbose=0)
    walk.check("JAX", frames[0])
