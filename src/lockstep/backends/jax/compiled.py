"""Executables: everything that is compiled for one set of devices, each once.

Three kinds make a step: a shard's gradient, the tree, and the update with what opens
the total for it. One executable for all of it would not be exact: XLA fuses and
orders what it sees together, and what it sees would follow from the number of
devices. Only the tree runs over all devices at once; it holds additions and nothing
that could be fused with them. A batch of one shard has one device and no tree: its
step is one executable.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as _switches

from lockstep.backends.jax import lazy_sums, named_pytrees, tree_program, vector_fields
from lockstep.backends.jax.batches import Form, Place
from lockstep.backends.jax.compile_cache import Program, Traced
from lockstep.backends.jax.lazy_sums import Lazy, Total
from lockstep.backends.jax.optimizers import Optimizer
from lockstep.backends.jax.shards import Found, Shards
from lockstep.backends.jax.tree_program import AXIS
from lockstep.backends.jax.vector_fields import Fields

config: Any = jax.config
_SPEC: Any = jax.sharding.PartitionSpec
# XLA's autotuner chooses kernels by the clock, so each process would have bits of its own. With this it takes the first
# that cuDNN and cuBLAS propose, which follows from the program and the GPU. Without a tuner (level 0) XLA does not even
# ask cuDNN, and a step of ResNet-18 in bf16 takes 1,800 ms.
_FIRST = {"xla_gpu_exclude_nondeterministic_ops": True}


class Executables:
    """The compiled functions over some devices, by what they were compiled for."""

    def __init__(self, devices: Sequence[Any], exact: bool) -> None:
        self.devices = devices
        self._mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
        self._by_row = jax.sharding.NamedSharding(self._mesh, _SPEC(AXIS))
        self._options = _FIRST if exact and devices[0].platform == "gpu" else None
        self.modes = ""  # of the model, in which the shards of a step are traced
        self._made: dict[Hashable, Any] = {}
        self._fillers: dict[tuple[str, int], list[Any]] = {}

    def put(self, tree: Any) -> list[Any]:
        """A fresh copy for every device; the script's own arrays are never shared with an update."""
        host = jax.tree.map(named_pytrees.numbers, tree)
        copies = [jax.device_put(host, device, may_alias=False) for device in self.devices]
        return [jax.tree.map(named_pytrees.wrapped, copy, tree) for copy in copies]

    def gradient(self, shards: Shards, place: Place, alone: bool, summed: bool, layout: Fields) -> Any:
        """The gradient of one shard, and what tracing it has shown."""

        def make() -> tuple[Any, Found]:
            found = Found()
            run = shards.gradient(place.form, place.examples, alone, summed, layout, found)
            return self._program(run), found

        return self._once(("gradient", place.form, alone, summed, layout, self.modes, _switched()), make)

    def step(self, shards: Shards, place: Place, summed: bool, layout: Fields, optimizer: Optimizer, clip: Any) -> Any:
        """All of a step whose batch is one shard, its leaf for who asks, and what tracing them has shown."""

        def make() -> tuple[Any, Any, Found]:
            found = Found()
            run = shards.step(place.form, place.examples, summed, layout, found, _update(optimizer, clip))
            traced = Traced(run)
            step, leaf = (self._program(traced.part(index)) for index in (0, 1))
            return step, leaf, found

        return self._once(("step", place.form, summed, layout, clip, self.modes, _switched()), make)

    def sums(self, shards: Shards, place: Place, summed: bool) -> Any:
        """The sums of one shard, and what tracing it has shown."""

        def make() -> tuple[Any, Found]:
            found = Found()
            return self._program(shards.sums(place.form, place.examples, summed, found)), found

        return self._once(("sums", place.form, summed, _switched()), make)

    def outputs(self, shards: Shards, form: Form) -> Any:
        """The outputs of one shard."""
        return self._once(("outputs", form, _switched()), lambda: self._program(shards.outputs(form)))

    def joined(self, vectors: Sequence[Any], lengths: dict[str, int]) -> dict[str, Any]:
        """The leaves of one round side by side, a row on every device; a device without one has a filler."""
        result = {}
        for dtype, length in lengths.items():
            rows = [
                self._filler(dtype, length)[index] if own is None else own[dtype] for index, own in enumerate(vectors)
            ]
            shape = (len(rows), length)
            result[dtype] = jax.make_array_from_single_device_arrays(shape, self._by_row, rows)
        return result

    def total(self, node: Lazy) -> Total:
        """The node, added up in one go; its vectors are whole on every device."""
        tree, rounds = tree_program.expression(node)
        fold = self._once(("fold", tree), lambda: tree_program.fold(self._mesh, tree, self._jit))
        vectors = fold([each.vectors for each in rounds])
        return Total(node.layout, lambda: vectors, lambda: lazy_sums.sums(node))

    def update(
        self,
        optimizer: Optimizer,
        layout: Fields,
        clip: float | None,
        *,
        differs: Any,
        divided: bool,
        donated: tuple[int, ...],
    ) -> Any:
        """(vectors, divisor or None, loss or None, params, rest, optimizer's state) -> the last three, one step on.

        The gradients are opened behind a barrier, so that the rest is compiled as a script's own jit of it is.
        """

        def run(vectors: Any, divisor: Any, loss: Any, params: Any, rest: Any, state: Any) -> Any:
            gradients = vector_fields.barrier(layout.gradients(vectors, divisor))
            rest = layout.others(vectors, rest, differs)
            params, state = step(gradients, state, params, loss)
            return params, rest, state

        step = _update(optimizer, clip)

        key = ("update", layout, differs, divided, clip, donated, _switched())
        return self._once(key, lambda: self._program(run, donated))

    def norm(self, layout: Fields, divided: bool) -> Any:
        """(vectors, divisor) -> the norm over all gradients."""

        def run(vectors: Any, divisor: Any) -> Any:
            return _norm(layout.gradients(vectors, divisor))

        return self._once(("norm", layout, divided, _switched()), lambda: self._program(run))

    def forget(self) -> None:
        """Compiles anew what the model has a part in."""
        self._made = {key: made for key, made in self._made.items() if key[0] in ("fold", "norm")}  # type: ignore[index]

    def _filler(self, dtype: str, length: int) -> list[Any]:
        if (dtype, length) not in self._fillers:
            self._fillers[dtype, length] = self.put(np.zeros((1, length), dtype))
        return self._fillers[dtype, length]

    def _program(self, run: Callable[..., Any], donated: tuple[int, ...] = ()) -> Program:
        return Program(run if self._options is None else _apart(run), self.devices, self._options, donated)

    def _jit(self, run: Callable[..., Any]) -> Any:
        return jax.jit(run, compiler_options=self._options)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _apart(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a GPU's default precision said aloud.

    XLA remembers what it has tuned in this process, by instruction, and takes that
    first. A script's own `jit` of the same convolution would choose our kernel.
    With its precision spelled out ours is another instruction, and the same kernel.
    """

    def apart(*arguments: Any) -> Any:
        if config.jax_default_matmul_precision is not None:
            return run(*arguments)
        with jax.default_matmul_precision("tensorfloat32"):
            return run(*arguments)

    return apart


def _update(optimizer: Optimizer, clip: float | None) -> Callable[..., Any]:
    """(gradients, optimizer's state, params, loss or None) -> (params, optimizer's state), one step on."""

    def run(gradients: Any, state: Any, params: Any, loss: Any) -> Any:
        if clip is not None:
            factor = jnp.minimum(1.0, clip / (_norm(gradients) + 1e-6))
            gradients = jax.tree.map(lambda value: value * factor.astype(value.dtype), gradients)
        return optimizer.stepped(gradients, state, params, loss)

    return run


def _norm(gradients: Any) -> Any:
    """The norm over all tensors, tensor by tensor in their order."""
    squares = [
        jnp.sum(jnp.square(value.astype(vector_fields.accumulated(value.dtype))))
        for value in jax.tree.leaves(gradients)
    ]
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    return jnp.sqrt(total)


def _switched() -> Hashable:
    """What a plain `jit` would be traced again for: the script may turn JAX's switches between two steps."""
    context: Hashable = _switches.trace_context()
    return context
