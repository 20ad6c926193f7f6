"""The executables (compiled programs) for one set of devices, each compiled once.

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
_FIRST_KERNELS = {"xla_gpu_exclude_nondeterministic_ops": True}


def _copy_to_host(leaf: Any) -> Any:
    # `may_alias=False` alone would still share the memory of a numpy array, so it is copied first.
    return np.array(leaf) if isinstance(leaf, np.ndarray) else named_pytrees.to_numpy(leaf)


class Executables:
    """A cache of the programs for a set of devices; a program's key has all that its compiled code depends on."""

    def __init__(self, devices: Sequence[Any], exact: bool) -> None:
        self.devices = devices
        self._mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
        self._by_row = jax.sharding.NamedSharding(self._mesh, _SPEC(AXIS))
        self._options = _FIRST_KERNELS if exact and devices[0].platform == "gpu" else None
        self.modes = ""  # the model's mode flags, with which a step's shards are traced
        self._programs: dict[Hashable, Any] = {}
        self._zeros: dict[tuple[str, int], list[Any]] = {}

    def put(self, tree: Any) -> list[Any]:
        """Returns a new copy of the pytree for every device, which shares no memory with the script's arrays."""
        host = jax.tree.map(_copy_to_host, tree)
        copies = [jax.device_put(host, device, may_alias=False) for device in self.devices]
        return [jax.tree.map(named_pytrees.wrap_key, copy, tree) for copy in copies]

    def find_gradient(
        self, shards: ShardPasses, batch: ShardBatch, alone: bool, summed: bool, fields: VectorFields
    ) -> Any:
        """Returns the program that computes one shard's gradient, and its `TraceInfo`, which the first call fills."""

        def make() -> tuple[Any, TraceInfo]:
            info = TraceInfo()
            run = shards.build_gradient(batch.spec, batch.examples, alone, summed, fields, info)
            return self._create_program(run), info

        return self._find(("gradient", batch.spec, alone, summed, fields, self.modes, _read_context()), make)

    def find_step(
        self,
        shards: ShardPasses,
        batch: ShardBatch,
        summed: bool,
        fields: VectorFields,
        optimizer: Optimizer,
        clip: Any,
    ) -> Any:
        """Returns the program of a one-shard step, the program of its partial sum, and their `TraceInfo`."""

        def make() -> tuple[Any, Any, TraceInfo]:
            info = TraceInfo()
            run = shards.build_step(batch.spec, batch.examples, summed, fields, info, _build_update(optimizer, clip))
            # One trace for both, so that a script's loss reads the variables around it once for step and gradient.
            traced = TracedFunction(run)
            step, leaf = (self._create_program(traced.select(index)) for index in (0, 1))
            return step, leaf, info

        return self._find(("step", batch.spec, summed, fields, clip, self.modes, _read_context()), make)

    def find_sums(self, shards: ShardPasses, batch: ShardBatch, summed: bool) -> Any:
        """Returns the program that computes one shard's sums in evaluation mode, and its `TraceInfo`."""

        def make() -> tuple[Any, TraceInfo]:
            info = TraceInfo()
            return self._create_program(shards.build_sums(batch.spec, batch.examples, summed, info)), info

        return self._find(("sums", batch.spec, summed, _read_context()), make)

    def find_outputs(self, shards: ShardPasses, spec: ShardSpec) -> Any:
        """Returns the program that computes one shard's outputs in evaluation mode."""
        return self._find(("outputs", spec, _read_context()), lambda: self._create_program(shards.build_outputs(spec)))

    def add_leaves(self, leaves: Leaves, lengths: Mapping[str, int]) -> dict[str, Any]:
        """Runs the tree; returns the sum over all shards, a vector for each dtype, complete on every device."""
        expression = tree_program.write_expression(leaves.places)
        fold = self._find(("fold", expression), lambda: tree_program.build_fold(self._mesh, expression, self._jit))
        total: dict[str, Any] = fold([self._join_round(vectors, lengths) for vectors in leaves.rounds])
        return total

    def _join_round(self, vectors: Sequence[Any], lengths: Mapping[str, int]) -> dict[str, Any]:
        """Returns one array per dtype over all devices: a device has its shard's vector, or zeros without a shard."""
        result = {}
        for dtype, length in lengths.items():
            rows = [
                self._find_zeros(dtype, length)[row] if own is None else own[dtype] for row, own in enumerate(vectors)
            ]
            shape = (len(rows) * length,)
            result[dtype] = jax.make_array_from_single_device_arrays(shape, self._by_row, rows)
        return result

    def find_update(
        self,
        optimizer: Optimizer,
        fields: VectorFields,
        clip: float | None,
        *,
        differs: Any,
        divided: bool,
        donate_argnums: Any,
    ) -> Any:
        """Returns the program of the update with the summed gradient.

        Its arguments are (vectors, divisor or None, loss or None, params, rest, optimizer state), and its results the
        updated params, rest and optimizer state. `differs` says which untrained variables the shards have changed, and
        `divided` whether a divisor is given.
        """

        def run(vectors: Any, divisor: Any, loss: Any, params: Any, rest: Any, state: Any) -> Any:
            # The barrier lets XLA compile the update as in a script's own jit, whose gradients are arguments.
            gradients = flat_vectors.barrier(fields.read_gradients(vectors, divisor))
            rest = fields.read_others(vectors, rest, differs)
            params, state = step(gradients, state, params, loss)
            return params, rest, state

        step = _build_update(optimizer, clip)
        key = ("update", fields, differs, divided, clip, donate_argnums, _read_context())
        return self._find(key, lambda: self._create_program(run, donate_argnums))

    def find_norm(self, fields: VectorFields, divided: bool) -> Any:
        """Returns the program that computes the norm of all gradients together from (vectors, divisor or None)."""

        def run(vectors: Any, divisor: Any) -> Any:
            return _compute_norm(fields.read_gradients(vectors, divisor))

        return self._find(("norm", fields, divided, _read_context()), lambda: self._create_program(run))

    def drop_model(self) -> None:
        """Drops all programs that were traced from the model or its optimizer; the tree and the norm have neither."""
        self._programs = {key: program for key, program in self._programs.items() if key[0] in ("fold", "norm")}  # type: ignore[index]

    def _find_zeros(self, dtype: str, length: int) -> list[Any]:
        """Returns a vector of zeros on every device, which is created once for each dtype and length."""
        if (dtype, length) not in self._zeros:
            self._zeros[dtype, length] = self.put(np.zeros(length, dtype))
        return self._zeros[dtype, length]

    def _create_program(self, run: Callable[..., Any], donate_argnums: tuple[int, ...] = ()) -> CompiledProgram:
        return CompiledProgram(
            run if self._options is None else _set_explicit_precision(run), self.devices, self._options, donate_argnums
        )

    def _jit(self, run: Callable[..., Any]) -> Any:
        return jax.jit(run, compiler_options=self._options)

    def _find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the program of this key; creates it if it is new. The key begins with the program's kind."""
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]


def _set_explicit_precision(run: Callable[..., Any]) -> Callable[..., Any]:
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
            factor = jnp.minimum(1.0, clip / (_compute_norm(gradients) + 1e-6))  # as torch's clip_grad_norm_
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
    """Returns the settings of JAX after whose change a plain `jit` traces again, e.g. the default precision."""
    context: Hashable = _jax_config.trace_context()
    return context
