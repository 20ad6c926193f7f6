"""The executables for one set of devices, each compiled once.

A step has three kinds of executables: a shard's gradient, the tree, and the update. A single executable for the whole
step would not be exact: XLA fuses and reorders operations within an executable, and which operations it contains would
depend on the number of devices. Only the tree runs on all devices at once, and it only has additions, so there is
nothing to fuse them with. A batch of one shard needs one device and no tree, so its step is one executable.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as _jax_config

from lockstep.backends.jax import flat_vectors, named_pytrees, tree_program
from lockstep.backends.jax.compile_cache import CompiledProgram, TracedFunction
from lockstep.backends.jax.flat_vectors import VectorFields
from lockstep.backends.jax.optimizers import Optimizer
from lockstep.backends.jax.partial_sums import Leaves
from lockstep.backends.jax.shard_inputs import ShardBatch, ShardSpec
from lockstep.backends.jax.shard_pass import ShardPasses, TraceInfo
from lockstep.backends.jax.tree_program import AXIS

config: Any = jax.config
_SPEC: Any = jax.sharding.PartitionSpec
# XLA's autotuner chooses kernels by measured time, so results could differ between processes. With this option XLA
# takes the first kernel that cuDNN and cuBLAS propose, which depends on the program and the GPU only. Without
# autotuning (level 0) XLA does not use cuDNN, and a step of ResNet-18 in bf16 takes 1,800 ms.
_FIRST = {"xla_gpu_exclude_nondeterministic_ops": True}


def _read_leaf(leaf: Any) -> Any:
    # `may_alias=False` alone would still share the memory of a numpy array, so it is copied first.
    return np.array(leaf) if isinstance(leaf, np.ndarray) else named_pytrees.to_numpy(leaf)


class Executables:
    """A cache of the compiled functions for a set of devices; the key is all that the compiled code depends on."""

    def __init__(self, devices: Sequence[Any], exact: bool) -> None:
        self.devices = devices
        self._mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
        self._by_row = jax.sharding.NamedSharding(self._mesh, _SPEC(AXIS))
        self._options = _FIRST if exact and devices[0].platform == "gpu" else None
        self.modes = ""  # the model's mode flags, with which a step's shards are traced
        self._compiled: dict[Hashable, Any] = {}
        self._fillers: dict[tuple[str, int], list[Any]] = {}

    def put(self, tree: Any) -> list[Any]:
        """Returns a new copy of the pytree for every device, which shares no memory with the script's arrays."""
        host = jax.tree.map(_read_leaf, tree)
        copies = [jax.device_put(host, device, may_alias=False) for device in self.devices]
        return [jax.tree.map(named_pytrees.wrap_key, copy, tree) for copy in copies]

    def gradient(self, shards: ShardPasses, batch: ShardBatch, alone: bool, summed: bool, layout: VectorFields) -> Any:
        """Returns the program that computes one shard's gradient, and its `TraceInfo`."""

        def make() -> tuple[Any, TraceInfo]:
            info = TraceInfo()
            run = shards.build_gradient(batch.spec, batch.examples, alone, summed, layout, info)
            return self._program(run), info

        return self._find(("gradient", batch.spec, alone, summed, layout, self.modes, _read_context()), make)

    def step(
        self,
        shards: ShardPasses,
        batch: ShardBatch,
        summed: bool,
        layout: VectorFields,
        optimizer: Optimizer,
        clip: Any,
    ) -> Any:
        """Returns the program of a one-shard step, the program of its partial sum, and their `TraceInfo`."""

        def make() -> tuple[Any, Any, TraceInfo]:
            info = TraceInfo()
            run = shards.build_step(batch.spec, batch.examples, summed, layout, info, _build_update(optimizer, clip))
            traced = TracedFunction(run)
            step, leaf = (self._program(traced.select(index)) for index in (0, 1))
            return step, leaf, info

        return self._find(("step", batch.spec, summed, layout, clip, self.modes, _read_context()), make)

    def sums(self, shards: ShardPasses, batch: ShardBatch, summed: bool) -> Any:
        """Returns the program that computes one shard's sums in evaluation mode, and its `TraceInfo`."""

        def make() -> tuple[Any, TraceInfo]:
            info = TraceInfo()
            return self._program(shards.build_sums(batch.spec, batch.examples, summed, info)), info

        return self._find(("sums", batch.spec, summed, _read_context()), make)

    def outputs(self, shards: ShardPasses, spec: ShardSpec) -> Any:
        """Returns the program that computes one shard's outputs in evaluation mode."""
        return self._find(("outputs", spec, _read_context()), lambda: self._program(shards.build_outputs(spec)))

    def total(self, leaves: Leaves, lengths: Mapping[str, int]) -> dict[str, Any]:
        """Returns the sum over all shards, a vector for each dtype, complete on every device."""
        expression = tree_program.write_expression(leaves.places)
        fold = self._find(("fold", expression), lambda: tree_program.fold(self._mesh, expression, self._jit))
        total: dict[str, Any] = fold([self._join_round(vectors, lengths) for vectors in leaves.rounds])
        return total

    def _join_round(self, vectors: Sequence[Any], lengths: Mapping[str, int]) -> dict[str, Any]:
        """Returns one array per dtype over all devices: each has its shard's vector, or zeros without a shard."""
        result = {}
        for dtype, length in lengths.items():
            rows = [self._filler(dtype, length)[row] if own is None else own[dtype] for row, own in enumerate(vectors)]
            shape = (len(rows) * length,)
            result[dtype] = jax.make_array_from_single_device_arrays(shape, self._by_row, rows)
        return result

    def update(
        self,
        optimizer: Optimizer,
        layout: VectorFields,
        clip: float | None,
        *,
        differs: Any,
        divided: bool,
        donated: Any,
    ) -> Any:
        """Returns the program of the update with the summed gradient.

        Its arguments are (vectors, divisor or None, loss or None, params, rest, optimizer state), and its results the
        updated params, rest and optimizer state. A barrier follows the gradients, so that XLA compiles the update as it
        would in a script's own jit.
        """

        def run(vectors: Any, divisor: Any, loss: Any, params: Any, rest: Any, state: Any) -> Any:
            gradients = flat_vectors.barrier(layout.read_gradients(vectors, divisor))
            rest = layout.read_others(vectors, rest, differs)
            params, state = step(gradients, state, params, loss)
            return params, rest, state

        step = _build_update(optimizer, clip)
        key = ("update", layout, differs, divided, clip, donated, _read_context())
        return self._find(key, lambda: self._program(run, donated))

    def norm(self, layout: VectorFields, divided: bool) -> Any:
        """Returns the program that computes the norm of all gradients together from (vectors, divisor or None)."""

        def run(vectors: Any, divisor: Any) -> Any:
            return _compute_norm(layout.read_gradients(vectors, divisor))

        return self._find(("norm", layout, divided, _read_context()), lambda: self._program(run))

    def forget(self) -> None:
        """Drops everything that was compiled from the model."""
        self._compiled = {key: program for key, program in self._compiled.items() if key[0] in ("fold", "norm")}  # type: ignore[index]

    def _filler(self, dtype: str, length: int) -> list[Any]:
        if (dtype, length) not in self._fillers:
            self._fillers[dtype, length] = self.put(np.zeros(length, dtype))
        return self._fillers[dtype, length]

    def _program(self, run: Callable[..., Any], donated: tuple[int, ...] = ()) -> CompiledProgram:
        return CompiledProgram(
            run if self._options is None else _spell_out_precision(run), self.devices, self._options, donated
        )

    def _jit(self, run: Callable[..., Any]) -> Any:
        return jax.jit(run, compiler_options=self._options)

    def _find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._compiled:
            self._compiled[key] = make()
        return self._compiled[key]


def _spell_out_precision(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with a GPU's default precision made explicit.

    XLA caches the kernels that it has chosen in this process by instruction. If the script has run a convolution in its
    own `jit`, Lockstep's program would get the kernel that was chosen there. An explicit precision makes it a different
    instruction, for which XLA chooses again, from the same kernels.
    """

    def with_precision(*arguments: Any) -> Any:
        if config.jax_default_matmul_precision is not None:
            return run(*arguments)
        with jax.default_matmul_precision("tensorfloat32"):
            return run(*arguments)

    return with_precision


def _build_update(optimizer: Optimizer, clip: float | None) -> Callable[..., Any]:
    """Returns a function that clips gradients and makes the optimizer's step.

    It takes (gradients, optimizer state, params, loss or None), and returns the new params and optimizer state.
    """

    def run(gradients: Any, state: Any, params: Any, loss: Any) -> Any:
        if clip is not None:
            factor = jnp.minimum(1.0, clip / (_compute_norm(gradients) + 1e-6))
            gradients = jax.tree.map(lambda value: value * factor.astype(value.dtype), gradients)
        return optimizer.compute_step(gradients, state, params, loss)

    return run


def _compute_norm(gradients: Any) -> Any:
    """Returns the norm of all tensors together; adds their squared norms in the pytree's order."""
    squares = [
        jnp.sum(jnp.square(value.astype(flat_vectors.choose_sum_dtype(value.dtype))))
        for value in jax.tree.leaves(gradients)
    ]
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    return jnp.sqrt(total)


def _read_context() -> Hashable:
    """Returns JAX's settings for which a plain `jit` traces again; the script may change them between steps."""
    context: Hashable = _jax_config.trace_context()
    return context
