"""The TensorFlow side of the seam: every replica of this process, side by side."""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.backends import host_vectors
from lockstep.backends.base import Array, Node, Recipe, State, Work
from lockstep.backends.change_detector import ChangeDetector
from lockstep.backends.tensorflow import flat_vectors, loaders, settings, state
from lockstep.backends.tensorflow.optimizer import Stepping
from lockstep.backends.tensorflow.program import Copy, Program
from lockstep.backends.tensorflow.shards import Leaf, Shards
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.batches import count, transform
from lockstep.core.layout import Layout
from lockstep.core.metrics import Column, Sums
from lockstep.core.outputs import ShardOutputs
from lockstep.core.reduction import Criterion
from lockstep.core.shard_sums import check_loss, pad
from lockstep.errors import ModelError


class TensorflowBackend:
    """Replicas of a program, whose variables are the script's own."""

    name = "tensorflow"

    def __init__(self, program: Program, recipe: Recipe, devices: Sequence[str]) -> None:
        self.devices: tuple[str, ...] = tuple(devices)
        self.versions: Mapping[str, str] = settings.read_versions(devices[0])
        self._program = program
        self._exact = recipe.options.exact
        self.outputs = ShardOutputs(recipe.keeps_outputs, _to_numpy, _on_cpu)
        self._stepping = Stepping(program, recipe.options.clip_norm)
        self._shards = Shards(program, devices, self._exact)
        self._layout: Layout | None = None
        self._made_for: Any = None
        self._last_scale = 1.0
        self._writes = ChangeDetector(lambda: state.sum_bytes(self._variables()))

    def spread(self, devices: Sequence[str]) -> None:
        """Replicas on other devices; the script's own variables stay."""
        self.devices = tuple(devices)
        self._shards.spread(devices)

    def computing(self, work: Work) -> AbstractContextManager[None]:
        """Deterministic operations, and the threads that the run was given."""
        for piece in work.shards.values():
            self._program.build(piece)
            break
        return settings.computing(work, self._exact)

    # -- one step

    def layout(self) -> Layout:
        """The layout of the variables trained now; a new one when a layer is frozen or a metric takes its shape."""
        trained, kept = self._program.trained(), self._program.kept()
        made_for = [*map(id, trained.values()), *map(id, kept.values()), self._program.room]
        if self._layout is None or made_for != self._made_for:
            if not trained:
                raise ModelError(
                    "Training needs a variable to train. Got none, all are frozen. Set trainable=True on some layer."
                )
            self._layout, self._made_for = flat_vectors.layout(trained, kept, self._program.room), made_for
        return self._layout

    def node(self, layout: Layout, memory: memoryview | None) -> Node:
        """Vectors in the given memory, or new ones."""
        return host_vectors.allocate(layout, memory)

    def leaves(self, work: Work, into: Mapping[int, Node]) -> Generator[tuple[int, Node], None, None]:
        """Computes the shards of all replicas, then writes leaf after leaf: what one lay in is used for a later one."""
        self._prepare(work)
        layout = self.layout()
        for shard, leaf in self._shards.leaves(work, self._own()):
            self._keep(work, shard, leaf.pair)
            check_loss(leaf.sums, work.step, shard)
            self._write(into[shard], layout, leaf, len(self._program.trained()), first=shard == 0)
            yield shard, into[shard]

    def _write(self, node: Node, layout: Layout, leaf: Leaf, split: int, first: bool) -> None:
        *arrays, there, sums = layout.fields
        flat_vectors.write(node, arrays[:split], leaf.gradients)
        kept = [
            value if value is None or first or value.dtype.kind == "f" else np.zeros_like(value) for value in leaf.kept
        ]
        flat_vectors.write(node, arrays[split:], kept)
        host_vectors.view(node, there)[:] = [value is not None for value in (*leaf.gradients, *leaf.kept)]
        host_vectors.view(node, sums)[:] = pad(leaf.sums, sums.size, self._shards.names.checks())

    def add(self, left: Node, right: Node | None, out: Node | None) -> Node:
        """One thread's addition."""
        return host_vectors.add(left, right, out)

    def divide(self, total: Node, by: float) -> None:
        """One thread's division."""
        host_vectors.divide(total, by)

    def finish(self, nodes: Mapping[Any, Node], num_shards: int) -> Node:
        """The root, added up in place."""
        return host_vectors.add_tree(nodes, num_shards)

    def sums(self, node: Node, layout: Layout) -> Sums:
        """The field of sums."""
        values = np.array(host_vectors.view(node, layout.fields[-1]))
        self._shards.names.check(values)
        return values

    def update(self, total: Node, work: Work) -> None:
        """The optimizer's step on the script's own variables, and the averaged statistics."""
        layout = self.layout()
        self._last_scale = self._stepping.scale()
        self._stepping.apply(total, layout, [bool(flag) for flag in host_vectors.view(total, layout.fields[-2])])
        self._writes.accept()

    def averaged(self) -> list[AveragedArray]:
        """The float variables that are not trained."""
        kept = {name: _variable(each) for name, each in self._program.kept().items()}
        return [
            AveragedArray(name, name, each.numpy())
            for name, each in kept.items()
            if tf.as_dtype(each.dtype).is_floating
        ]

    def norm(self, total: Node) -> float:
        """The norm over all gradients, tensor by tensor, before clipping."""
        assert self._layout is not None
        fields = self._layout.fields[: len(self._program.trained())]
        squares = [float(np.square(host_vectors.view(total, field), dtype=np.float64).sum()) for field in fields]
        return math.sqrt(sum(squares)) / self._last_scale

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard computed."""
        return self._shards.names.columns

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """A loss that does not say how the examples count; it is called as it is, outside of any graph."""
        found = self._program.criterion
        return None if found is None else partial(_judged, found)

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Loss and metrics of each shard in evaluation mode."""
        self._prepare(work)
        for shard, (sums, pair) in self._shards.sums(work, self._own()):
            self._keep(work, shard, pair)
            yield shard, sums

    def _keep(self, work: Work, shard: int, pair: Any) -> None:
        if pair is not None:
            outputs, targets = tf.nest.map_structure(lambda each: _plain(each) if tf.is_tensor(each) else each, pair)
            self.outputs.keep(work, shard, outputs, targets, count(work.shards[shard]))

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """The outputs in evaluation mode."""
        for shard, outputs in self._shards.outputs(work, self._own()):
            yield shard, tf.nest.map_structure(_plain, outputs)

    def native(self, outputs: Any) -> Any:
        """Outputs as tensors."""
        return transform(outputs, _tensor)

    def _prepare(self, work: Work) -> None:
        """Makes the program ready for batches such as these."""
        for piece in work.shards.values():
            self._program.prepare(piece)
            break

    def _own(self) -> Copy:
        """The script's own variables, those of a step."""
        return Copy(*([*map(_variable, part().values())] for part in (self._program.trained, self._program.kept)))

    # -- state

    def _variables(self) -> dict[str, Any]:
        program = self._program
        model = {**program.trained(), **program.kept(), **program.others()}
        named = {f"model.{name}": variable for name, variable in model.items()}
        own = self._stepping.optimizer_variables().items()
        return named | {f"optimizer.{name}": variable for name, variable in own}

    def state(self) -> State:
        """Every variable of the script's own model and optimizer."""
        return state.read_variables(self._variables())

    def copies(self) -> Iterator[State]:
        """Every replica's, as it computes with it next; what no step changes is there once."""
        columns = zip(*(copy.all for copy in self._shards.replicas.copies(self._own())), strict=True)
        spread = {id(column[0]): column for column in columns}
        variables = {name: _variable(each) for name, each in self._variables().items()}
        for replica in range(len(self.devices)):
            found = {name: spread[id(own)][replica] if id(own) in spread else own for name, own in variables.items()}
            yield {name: state.to_array(variable) for name, variable in found.items()}

    def model_arrays(self) -> Mapping[str, Any]:
        """The variables of the script's own model."""
        program = self._program
        variables = {**program.trained(), **program.kept(), **program.others()}
        return {f"model.{name}": _variable(variable) for name, variable in variables.items()}

    def load(self, saved: Mapping[str, Array]) -> None:
        """Take over a whole state; one that does not fit changes nothing."""
        state.write_variables(self._variables(), saved)

    def numbers(self) -> list[dict[str, Any]]:
        """The numbers that the optimizer was made with."""
        return self._stepping.numbers()

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them into the optimizer."""
        self._stepping.set_numbers(numbers)

    def controls(self) -> Any:
        """The optimizer's numbers."""
        return self._stepping.numbers()

    def turn(self, controls: Any) -> None:
        """Takes over the script's numbers."""
        self._stepping.set_numbers(controls)

    def touched(self) -> bool:
        """Whether the script wrote to the state; TensorFlow has no counters, so the bytes are compared."""
        return self._writes.has_changed()

    # -- data and processes

    def host(self, value: Any) -> Any:
        """A tensor as numpy."""
        return value.numpy() if tf.is_tensor(value) or isinstance(value, tf.Variable) else value

    def stage(self, piece: Any) -> Any:
        """TensorFlow copies the piece when it computes."""
        return piece

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """A source for a `tf.data.Dataset`."""
        return loaders.of(data, batch_size, shuffle, seed)

    def num_threads(self) -> int:
        """TensorFlow's intra-op threads."""
        return settings.num_threads()


def _judged(criterion: Any, outputs: Any, targets: Any) -> float | None:
    value = criterion(*(transform(each, _tensor) for each in (outputs, targets)))
    return float(value) if tf.is_tensor(value) and not value.shape.rank else None


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def _variable(variable: Any) -> Any:
    """The tf.Variable inside a Keras variable."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def _to_numpy(value: Any) -> Any:
    return _plain(value) if tf.is_tensor(value) else np.array(value)


def _on_cpu(value: Any) -> Any:
    with tf.device("/CPU:0"):
        return tf.convert_to_tensor(value)


def _plain(value: Any) -> Any:
    """numpy has no bfloat16; outputs leave as float32."""
    return np.array(tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value)
