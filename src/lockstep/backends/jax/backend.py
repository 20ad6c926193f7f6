"""The JAX backend: one process drives all of its devices, each of which has a replica."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax

from lockstep.backends.base import Recipe
from lockstep.backends.jax import array_ops, devices, losses, partial_sums, rng, shard_inputs
from lockstep.backends.jax.flat_vectors import VectorFields, read_floats
from lockstep.backends.jax.functional_model import FunctionalModel
from lockstep.backends.jax.partial_sums import DeviceSum, DeviceVector, Leaves
from lockstep.backends.jax.replicas import JaxReplicas
from lockstep.backends.jax.shard_inputs import to_host
from lockstep.backends.jax.shard_pass import ShardPasses
from lockstep.backends.jax.shard_runner import JaxShardRunner
from lockstep.backends.jax.sums_reader import read_changed
from lockstep.backends.jax.train_mode import Modes
from lockstep.core import host_vectors, tree
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.batches import transform
from lockstep.core.fold import Fold
from lockstep.core.layout import Layout
from lockstep.core.loss_reduction import Criterion
from lockstep.core.metrics import Column, Sums, loss, resolve
from lockstep.core.named_metrics import NamedMetrics
from lockstep.core.outputs import ShardOutputs
from lockstep.core.shard_sums import ShardSums, find_room
from lockstep.core.types import Array, PartialSum, State, Work
from lockstep.errors import LockstepError, ModelError


class JaxBackend:
    """Replicas of a JAX model on the devices of this process."""

    name = "jax"

    def __init__(self, recipe: Recipe, names: Sequence[str]) -> None:
        options = recipe.options
        if options.precision == "fp16":
            raise ModelError(
                "precision='fp16' is not supported on JAX, because it needs a loss scale. Use precision='bf16'."
            )
        self._recipe = recipe
        self._metrics = resolve(recipe.metrics, NamedMetrics(array_ops, losses.find_traits(recipe.loss)).functions())
        self._replicas = JaxReplicas(recipe)
        passes = ShardPasses(self._replicas.model, recipe.loss, self._metrics, options.precision, recipe.keeps_outputs)
        self.outputs = ShardOutputs(recipe.keeps_outputs, shard_inputs.to_numpy, shard_inputs.to_cpu)
        self._runner = JaxShardRunner(self._replicas, passes, self.outputs)
        self._work: Work | None = None  # of the last command, for a model whose variables do not exist yet
        self.spread(names)
        self.versions: Mapping[str, str] = devices.read_versions(names)

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the shard whose sums were read last."""
        return self._runner.reader.columns

    def spread(self, names: Sequence[str]) -> None:
        """Puts a replica on each of these devices; the state stays as it is."""
        self._replicas.spread(names)
        self.devices = tuple(names)

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """Copies what the script has changed to all devices; adds the step's number to errors of the script's code."""
        self._work = work
        if self._replicas.has_variables:
            self._replicas.copy_script_changes()
        try:
            yield
        except LockstepError:
            raise
        except Exception as error:
            error.add_note(f"In step {work.step}.")
            raise

    # -- one step

    def layout(self) -> Layout:
        """Returns the layout of a partial sum: the parameters' gradients, then the model's untrained variables."""
        self._create_variables(self._find_inputs)
        return self._fields.layout

    def partial_sums(self, work: Work, fold: Fold) -> tuple[Mapping[tree.Span, PartialSum], ShardSums]:
        """Starts the program of every shard, then the tree's and, if the gradient needs no division, the update's.

        The sum of all shards stays on the devices. If other processes have shards, or some shards are empty, the
        partial sums are copied to the host.
        """
        runner, replicas = self._runner, self._replicas
        root = tree.root(work.num_shards)
        if work.num_shards == 1 and not replicas.update_needs_loss:
            total, shard_sums = runner.start_step(work, self._fields, self._recipe.options.clip_norm)
            return {root: total}, shard_sums
        leaves, shard_sums = runner.start_shards(work, self._fields)
        if len(leaves.places) < work.num_shards:  # the tree's program needs every leaf
            return self._copy_to_host(leaves, fold), shard_sums
        if fold.check is not None:
            for shard in leaves.places:
                fold.check(shard, leaves.get(shard))
        layout = self._fields.layout
        vectors = replicas.executables.add_leaves(leaves, layout.lengths)
        total = DeviceSum(layout, lambda: vectors)
        info = runner.info
        if info is not None and not info.divided:  # a divisor is known only after the sums are read
            replicas.start_early_update(total, info.changed)
        return {root: total}, shard_sums

    def _copy_to_host(self, leaves: Leaves, fold: Fold) -> Mapping[tree.Span, PartialSum]:
        """Returns the fold's partial sums: adds them on the devices, and copies them to the fold's buffers."""
        buffers = {}
        for shard in sorted(leaves.places):
            buffers[shard] = fold.get_buffer(shard)
            fold.push(shard, leaves.get(shard))
        # A partial sum belongs in the buffer of its first shard, as if the fold had added the buffers.
        return {span: self.add(value, None, buffers[span.start]) for span, value in fold.partial_sums().items()}

    def create_buffer(self, layout: Layout, memory: memoryview | None) -> PartialSum:
        """Creates the vectors of a partial sum in host memory: in the given memory, or in new memory."""
        return host_vectors.create_buffer(layout, memory)

    def add(self, left: PartialSum, right: PartialSum | None, out: PartialSum | None) -> PartialSum:
        """Returns left + right, added by XLA, or `left` if `right` is None; writes it to `out` in host memory."""
        if right is not None:
            left = {dtype: partial_sums.add(left[dtype], right[dtype], self._replicas.device) for dtype in left}
        if out is None or any(isinstance(vector, jax.Array) for vector in out.values()):
            return left
        for dtype, vector in left.items():
            out[dtype][:] = vector
        return out

    def divide(self, total: PartialSum, by: float) -> None:
        """Divides a sum in host memory in place, with XLA; for a sum on devices, stores the divisor for the update."""
        for vector in total.values():
            if isinstance(vector, DeviceVector):
                vector.total.divisor = by
            else:
                vector[:] = partial_sums.divide(vector, by, self._replicas.device)

    def update(self, total: PartialSum, sums: Sums, work: Work) -> None:
        """Applies the optimizer's step with the summed gradient, and writes the averaged untrained variables."""
        self._replicas.update(self._to_device_sum(total), read_changed(sums, self._fields), loss(sums))

    def averaged(self) -> list[AveragedArray]:
        """Returns copies of the untrained float variables that a shard of this step changes."""
        info = self._runner.info
        assert info is not None
        # The script only gets copies of a function's variables, so it cannot write to them.
        writable = not isinstance(self._replicas.model, FunctionalModel)
        return read_floats(self._replicas.copies[0][1], info.changed, writable)

    def norm(self, total: PartialSum) -> float:
        """Returns the norm of all gradients together, before clipping."""
        return self._replicas.norm(self._to_device_sum(total))

    def _to_device_sum(self, total: PartialSum) -> DeviceSum:
        """Returns the sum as a `DeviceSum`, also if an exchange has put it into host memory."""
        return total if isinstance(total, DeviceSum) else DeviceSum(self._fields.layout, lambda: total)

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """The loss as a function of (outputs, targets), called without jit; None if its reduction is known."""
        criterion = losses.find_criterion(self._recipe.loss)
        return None if criterion is None else partial(self._compute_loss, criterion)

    def _compute_loss(self, criterion: Any, outputs: Any, targets: Any) -> float | None:
        """Returns the loss of numpy outputs and targets; None if it is not a scalar."""
        spec, arrays = shard_inputs.split_arrays((outputs, targets))
        value = criterion(*spec.unflatten([jax.device_put(array, self._replicas.device) for array in arrays]))
        return float(value) if isinstance(value, jax.Array) and not value.ndim else None

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Yields each shard's loss and metrics, computed in evaluation mode without an update."""
        self._create_variables(self._find_inputs)
        yield from self._runner.evaluate(work)

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """Yields each shard's outputs, computed in evaluation mode without an update."""
        self._create_variables(lambda piece: piece)  # the examples of `predict` are the inputs alone
        for shard, outputs in self._runner.forward(work):
            yield shard, jax.tree.map(shard_inputs.to_numpy, outputs)

    def native(self, outputs: Any) -> Any:
        """Returns outputs as JAX arrays on the first replica's device."""
        return transform(outputs, lambda value: jax.device_put(value, self._replicas.device))

    # -- state

    def state(self) -> State:
        """Returns a copy of the first replica's state."""
        return dict(self._replicas.state())

    def copies(self) -> Iterator[Mapping[str, Array]]:
        """Yields the state of every replica; replicas on one device share their arrays."""
        for row in self._replicas.rows:
            yield self._replicas.state(row)

    def model_arrays(self) -> Mapping[str, Any]:
        """Returns the arrays of the first replica's model, by name."""
        return self._replicas.model_arrays()

    def load(self, state: Mapping[str, Array]) -> None:
        """Writes a saved state into every replica and into the script's model and optimizer."""
        self._replicas.load(state)

    def numbers(self) -> list[dict[str, Any]]:
        """Returns the hyperparameters that `optax.inject_hyperparams` stores in the optimizer state."""
        self._replicas.copy_script_changes()
        return self._replicas.optimizer.read_hyperparams()

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes hyperparameters into the optimizer state, on every device."""
        self._replicas.set_hyperparams(numbers)

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes of an nnx module that are scalars or strings, and its mode flags."""
        return {"model": self._replicas.model.read_attributes(), "modes": self._read_modes()}

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Writes saved scalars, strings and mode flags into an nnx module."""
        if attributes["model"] is not None:
            self._replicas.model.write_attributes(attributes["model"])
        if self._replicas.model.mode_flags is not None:
            self._replicas.model.mode_flags.restore(attributes.get("modes", {}))

    def enter_training_mode(self) -> None:
        """Calls `train()` of an nnx module that is in evaluation mode; a linen module gets its mode in each call."""
        if self._replicas.model.mode_flags is not None:
            self._replicas.model.mode_flags.enter_training()

    def _read_modes(self) -> Modes:
        flags = self._replicas.model.mode_flags
        return {} if flags is None else flags.read()

    def controls(self) -> Any:
        """Returns the hyperparameters, and an nnx module's attributes and mode flags, for other processes."""
        return {"numbers": self.numbers(), "model": self._replicas.model.read_attributes(), "modes": self._read_modes()}

    def turn(self, controls: Any) -> None:
        """Applies the values that `controls` has returned in another process."""
        self._replicas.model.write_attributes(controls["model"])
        if self._replicas.model.mode_flags is not None:
            self._replicas.model.mode_flags.write(controls["modes"])
        self.set_numbers(controls["numbers"])

    def touched(self) -> bool:
        """Returns whether the script wrote to the state since the last step."""
        return self._replicas.touched()

    # -- data and processes

    def host(self, value: Any) -> Any:
        """Returns a JAX array as numpy, and any other value as it is."""
        return to_host(value) if isinstance(value, jax.Array | DeviceVector) else value

    def stage(self, piece: Any) -> Any:
        """Returns the shard's examples as they are, because the compiled program copies them to its device."""
        return piece

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """Returns None, because JAX has no data sets or loaders of its own."""
        return None

    def num_threads(self) -> int:
        """Returns 1: shards have no threads of their own, because all devices of a process share XLA's pool."""
        return 1

    # -- layout and variables

    @property
    def _fields(self) -> VectorFields:
        """The positions of gradients and untrained variables in the vectors of a partial sum."""
        return self._replicas.make_fields(find_room(self._metrics, self._recipe.loss))

    def _create_variables(self, find_inputs: Callable[[Any], Any]) -> None:
        """Initializes a linen module without variables from the first shard of the first batch."""
        if not self._replicas.has_variables:
            work = self._work
            assert work is not None
            piece = work.shards.get(0)
            if piece is None and work.first is not None:  # another process computes shard 0
                piece = work.first()
            self._replicas.create_variables(find_inputs(piece), rng.derive_initial_key(work.seed))

    def _find_inputs(self, piece: Any) -> Any:
        """Returns the model's inputs in a shard's examples."""
        return losses.find_inputs(self._recipe.loss, piece)
