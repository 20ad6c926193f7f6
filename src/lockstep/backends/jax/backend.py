"""The JAX side of the seam: one process drives all of its devices.

Every device holds a replica; which of them computed a shard leaves no trace in it.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from lockstep.backends.base import Array, Node, Recipe, State, Work
from lockstep.backends.jax import array_ops, batches, devices, host_math, losses, rng, sums
from lockstep.backends.jax.batches import on_host
from lockstep.backends.jax.functional_model import Applied
from lockstep.backends.jax.lazy_sums import Host, Lazy, Sum, Total, Vector, plain
from lockstep.backends.jax.replicas import Replicas
from lockstep.backends.jax.shard_runner import Passes
from lockstep.backends.jax.shards import Shards
from lockstep.backends.jax.train_mode import Modes
from lockstep.backends.jax.vector_fields import Fields, read_floats
from lockstep.core import tree
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.batches import transform
from lockstep.core.layout import Layout
from lockstep.core.metrics import Column, Sums, loss, resolve
from lockstep.core.named_metrics import NamedMetrics
from lockstep.core.outputs import ShardOutputs
from lockstep.core.reduction import Criterion
from lockstep.core.shard_sums import find_room
from lockstep.errors import LockstepError, ModelError


class JaxBackend:
    """Replicas of a JAX model on the devices of this process."""

    name = "jax"

    def __init__(self, recipe: Recipe, names: Sequence[str]) -> None:
        options = recipe.options
        if options.precision == "fp16":
            raise ModelError("JAX computes in bfloat16 without a loss scale. Got precision='fp16'. Use 'bf16'.")
        self._recipe = recipe
        self._metrics = resolve(recipe.metrics, NamedMetrics(array_ops, losses.find_traits(recipe.loss)).functions())
        self._replicas = Replicas(recipe)
        shards = Shards(self._replicas.model, recipe.loss, self._metrics, options.precision, recipe.keeps_outputs)
        self.outputs = ShardOutputs(recipe.keeps_outputs, batches.to_numpy, batches.on_cpu)
        self._passes = Passes(self._replicas, shards, self.outputs)
        self._work: Work | None = None
        self.spread(names)
        self.versions: Mapping[str, str] = devices.read_versions(names)

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard read."""
        return self._passes.reader.columns

    def spread(self, names: Sequence[str]) -> None:
        """Puts a replica on each of these devices; the state stays as it is."""
        self._replicas.spread(names)
        self.devices = tuple(names)

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """Takes over what the script has changed; an error tells the step it came from."""
        self._work = work
        if self._replicas.ready:
            self._replicas.look()
        try:
            yield
        except LockstepError:
            raise
        except Exception as error:
            error.add_note(f"In step {work.step}.")
            raise

    # -- one step

    def layout(self) -> Layout:
        """Every parameter, what else the model keeps, and the sums."""
        self._start(self._inputs)
        return self._fields.layout

    def node(self, layout: Layout, memory: memoryview | None) -> Node:
        """A node in the host's memory; leaves stay on their devices unless an exchange lent the memory."""
        return Host(layout, memory)

    def leaves(self, work: Work, into: Mapping[int, Node]) -> Generator[tuple[int, Node], None, None]:
        """Starts every shard, then gives their leaves in order; nobody waits for a device here."""
        leaves = self._passes.leaves(work, self._fields, self._recipe.options.clip_norm)
        for shard in sorted(leaves):
            given = into.get(shard)
            yield shard, self.add(leaves[shard], None, given) if getattr(given, "given", False) else leaves[shard]

    def add(self, left: Node, right: Node | None, out: Node | None) -> Node:
        """Notes the addition of nodes on devices; adds those in the host's memory as the device would."""
        if isinstance(left, Lazy) and isinstance(right, Lazy) and (out is None or isinstance(out, Lazy)):
            return Sum(left, right)
        values = plain(left)
        if right is not None:
            others = plain(right)
            values = {dtype: host_math.add(values[dtype], others[dtype], self._replicas.device) for dtype in values}
        if out is None:
            return values
        for dtype, vector in values.items():
            out[dtype][:] = vector
        return out

    def divide(self, total: Node, by: float) -> None:
        """Notes the division of a node on devices; divides in the host's memory as the device would."""
        for vector in total.values():
            if isinstance(vector, Vector):
                assert isinstance(vector.node, Total)
                vector.node.divisor = by
            else:
                vector[:] = host_math.divide(vector, by, self._replicas.device)

    def finish(self, nodes: Mapping[Any, Node], num_shards: int) -> Node:
        """The root: one executable for nodes on devices."""
        total = tree.total(tree.root(num_shards), nodes, lambda left, right: self.add(left, right, left))
        assert total is not None
        if isinstance(total, Total) or not isinstance(total, Lazy):
            return total
        whole = self._replicas.executables.total(total)
        found = self._passes.found
        if found is not None and not found.divided:
            self._replicas.anticipate(whole, found.changed)
        return whole

    def sums(self, node: Node, layout: Layout) -> Sums:
        """The field of sums; raises where the shards do not go together."""
        field = layout.fields[-1]
        if isinstance(node, Total):
            values = np.array(node.sums)
        else:
            values = np.array(node[field.dtype][field.offset : field.offset + field.size])
        self._passes.reader.check(values, self._fields)
        return values

    def update(self, total: Node, work: Work) -> None:
        """The optimizer's step with the summed gradient, and the averaged variables."""
        whole = self._whole(total)
        if not self._replicas.arrive(whole):
            self._replicas.update(whole, sums.changed(whole.sums, self._fields), loss(whole.sums))

    def averaged(self) -> list[AveragedArray]:
        """The float variables beside the parameters that a shard of this step changes."""
        found = self._passes.found
        assert found is not None
        writable = not isinstance(self._replicas.model, Applied)
        return read_floats(self._replicas.copies[0][1], found.changed, writable)

    def norm(self, total: Node) -> float:
        """The norm over all tensors of the gradient, before clipping."""
        return self._replicas.norm(self._whole(total))

    def _whole(self, total: Node) -> Total:
        """A total out of whatever an exchange has made of it."""
        if isinstance(total, Total):
            return total
        vectors = plain(total)
        return Total(
            self._fields.layout,
            lambda: {dtype: vectors[dtype][:length] for dtype, length in self._fields.lengths.items()},
            lambda: self.sums(total, self._fields.layout),
        )

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """A function that does not say how the examples count; it is called as it is, without compiling."""
        found = losses.find_unknown(self._recipe.loss)
        return None if found is None else partial(self._judged, found)

    def _judged(self, criterion: Any, outputs: Any, targets: Any) -> float | None:
        form, arrays = batches.split((outputs, targets))
        value = criterion(*form.filled([jax.device_put(array, self._replicas.device) for array in arrays]))
        return float(value) if isinstance(value, jax.Array) and not value.ndim else None

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Loss and metrics of each shard, without training."""
        self._start(self._inputs)
        yield from self._passes.evaluate(work)

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """The outputs of each shard, without training."""
        self._start(lambda piece: piece)
        for shard, outputs in self._passes.forward(work):
            yield shard, jax.tree.map(batches.to_numpy, outputs)

    def native(self, outputs: Any) -> Any:
        """Outputs as JAX's arrays on the first replica's device."""
        return transform(outputs, lambda value: jax.device_put(value, self._replicas.device))

    # -- state

    def state(self) -> State:
        """The replicas' state."""
        return self._replicas.state()

    def copies(self) -> Iterator[State]:
        """Every replica's; those on one device share them."""
        for row in self._replicas.rows:
            yield self._replicas.state(row)

    def model_arrays(self) -> Mapping[str, Any]:
        """The first replica's arrays."""
        return self._replicas.model_arrays()

    def load(self, state: Mapping[str, Array]) -> None:
        """Takes over a whole state."""
        self._replicas.load(state)

    def numbers(self) -> list[dict[str, Any]]:
        """What `optax.inject_hyperparams` keeps where it can be read."""
        self._replicas.look()
        return self._replicas.optimizer.numbers()

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them into the optimizer's state, on every device."""
        self._replicas.set_numbers(numbers)

    def attributes(self) -> dict[str, Any]:
        """The numbers and words in an nnx module, and its modes."""
        return {"model": self._replicas.model.controls(), "modes": self._modes()}

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Writes them into the module."""
        if attributes["model"] is not None:
            self._replicas.model.turn(attributes["model"])
        if self._replicas.model.mode_flags is not None:
            self._replicas.model.mode_flags.restore(attributes.get("modes", {}))

    def enter_training_mode(self) -> None:
        """Calls an nnx module's `train()` if all its flags tell of evaluation; a linen module is told in each call."""
        if self._replicas.model.mode_flags is not None:
            self._replicas.model.mode_flags.enter_training()

    def _modes(self) -> Modes:
        flags = self._replicas.model.mode_flags
        return {} if flags is None else flags.read()

    def controls(self) -> Any:
        """The optimizer's numbers, the numbers and words in an nnx module, and its modes."""
        return {"numbers": self.numbers(), "model": self._replicas.model.controls(), "modes": self._modes()}

    def turn(self, controls: Any) -> None:
        """Takes over another process's controls."""
        self._replicas.model.turn(controls["model"])
        if self._replicas.model.mode_flags is not None:
            self._replicas.model.mode_flags.write(controls["modes"])
        self.set_numbers(controls["numbers"])

    def touched(self) -> bool:
        """Whether the script wrote to the state since the last step."""
        return self._replicas.touched()

    # -- data and processes

    def host(self, value: Any) -> Any:
        """An array of JAX's as numpy."""
        return on_host(value) if isinstance(value, jax.Array | Vector) else value

    def stage(self, piece: Any) -> Any:
        """A round is put together from several pieces, so they stay on the host until then."""
        return piece

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """JAX has no data containers of its own."""
        return None

    def num_threads(self) -> int:
        """XLA's threads are one pool for the whole process."""
        return 1

    # -- inside

    @property
    def _fields(self) -> Fields:
        return self._replicas.fields(find_room(self._metrics, self._recipe.loss))

    def _start(self, inputs: Callable[[Any], Any]) -> None:
        """Makes a linen module's variables from the first shard of the first batch, where there are none yet."""
        if not self._replicas.ready:
            work = self._work
            assert work is not None
            piece = work.shards.get(0)
            if piece is None and work.first is not None:
                piece = work.first()
            self._replicas.start(inputs(piece), rng.initial(work.seed))

    def _inputs(self, piece: Any) -> Any:
        return losses.find_inputs(self._recipe.loss, piece)
