"""The MXNet side of the seam: every replica of the block, driven from one process."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from lockstep.backends.base import Array, Node, Recipe, State, Work
from lockstep.backends.mxnet import array_ops, flat_vectors, inputs, losses, running_stats, settings, uses_rng
from lockstep.backends.mxnet.arrays import array_of, classic, dtype_of
from lockstep.backends.mxnet.attribute_guard import AttributeGuard, copy_vectors
from lockstep.backends.mxnet.flat_vectors import Vectors
from lockstep.backends.mxnet.optimizer import Updates
from lockstep.backends.mxnet.replicas import Replicas, context_of
from lockstep.backends.mxnet.running_stats import Statistics
from lockstep.backends.mxnet.shards import Shards
from lockstep.backends.mxnet.state import NamedState
from lockstep.backends.mxnet.unsupported import check_block, check_engine, check_graphs, check_optimizer
from lockstep.core import seeds, tree
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.batches import transform
from lockstep.core.layout import Layout
from lockstep.core.metrics import Column, Sums, resolve
from lockstep.core.named_metrics import NamedMetrics
from lockstep.core.outputs import ShardOutputs
from lockstep.core.reduction import Criterion
from lockstep.errors import PlanError


class MxnetBackend:
    """Replicas of a gluon block, one on each context."""

    name = "mxnet"
    versions: Mapping[str, str] = {"mxnet": mx.__version__}

    def __init__(self, recipe: Recipe, devices: Sequence[str]) -> None:
        check_block(recipe.model)
        if recipe.options.exact:
            check_engine()
        if recipe.options.precision is not None:
            raise PlanError(
                f"MXNet's precision is the block's own. Got precision={recipe.options.precision!r}. "
                "Use net.cast('float16'), and multi_precision=True in the optimizer."
            )
        self.devices = tuple(devices)
        self._recipe = recipe
        self._places = [context_of(device) for device in devices]  # of every replica
        self._replicas = Replicas(recipe.model, self._places)
        self._updates = Updates(recipe.optimizer, self._replicas.parameters)
        if recipe.options.exact:
            check_optimizer(self._updates.optimizer)
        self._named_state = NamedState(self._replicas, self._updates)
        self._loss = losses.resolve(recipe.loss)
        self.outputs = ShardOutputs(recipe.keeps_outputs, inputs.host, inputs.on_cpu)
        named = NamedMetrics(array_ops, losses.find_traits(self._loss)).functions()
        self._shards = Shards(recipe.model, self._loss, resolve(recipe.metrics, named), self.outputs)
        self._statistics = Statistics(self._replicas)
        self._watch = uses_rng.Watch(recipe.model, self._loss)
        self._guard = AttributeGuard(recipe.model, self._loss) if recipe.options.exact else AttributeGuard()
        self._trained: dict[str, tuple[int, Any]] = {}
        self._layout: Layout | None = None
        self._form: Any = None
        self._narrow: frozenset[int] = frozenset()
        self._work: Work | None = None
        self._divisor = 1.0  # by what the update divides the gradient

    def spread(self, devices: Sequence[str]) -> None:
        """Other contexts for the replicas; the block stays on the first."""
        self.devices = tuple(devices)
        self._places = [context_of(device) for device in devices]
        self._replicas.move(self._places)
        self._statistics.forget()

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """The threads that were asked for, and no recording of the script's own."""
        check_graphs(self._recipe.model)
        self._work = work
        with settings.threads(work.threads, self._replicas.contexts), autograd.pause():
            yield

    # -- one step

    def layout(self) -> Layout:
        """The layout of the parameters trained now; a new one when one is frozen, or gets another type."""
        if self._replicas.missing and self._work is not None:
            self._shards.show(self._work, self._replicas)
        self._replicas.require()
        self._trained = self._replicas.trained = self._updates.trained()
        averaged = running_stats.of(self._recipe.model, self._replicas.parameters)
        form = [(name, dtype_of(self._replicas.parameters[name])) for name in (*self._trained, *averaged)]
        if self._layout is None or form != self._form:
            gradients = [self._replicas.field(name) for name in self._trained]
            others = running_stats.fields([self._replicas.field(name) for name in averaged])
            self._layout = Layout.build(gradients, [*others, ("sums", "float64", (self._shards.num_sums,))])
            self._form = form
            fields = self._layout.fields[: len(self._trained)]
            kinds = [kind for _, kind in form[: len(fields)]]
            self._narrow = frozenset(
                index for index, (field, kind) in enumerate(zip(fields, kinds, strict=True)) if field.dtype != kind
            )
            self._statistics.lie(averaged, self._layout)
        return self._layout

    def node(self, layout: Layout, memory: memoryview | None) -> Node:
        """Vectors in the given memory, or on the context that will write a leaf there."""
        if memory is None:
            return Vectors(layout, len(self._trained))
        return flat_vectors.inside(memory, layout, len(self._trained))

    def leaves(self, work: Work, into: Mapping[int, Node]) -> Generator[tuple[int, Node], None, None]:
        """Tells the engine of one shard for every context in turn; the block's statistics end as they began."""
        self._shards.begin(self._replicas.wide(), self._watch.may_draw(), self._narrow)
        self._guard.begin(work.num_shards)
        try:
            with self._replicas.spread() as spread, self._statistics.kept(spread) as kept:
                variables = [[spread[name][place] for name in self._trained] for place in range(len(kept))]
                for place, shard, piece in self._in_turn(work):
                    leaf = _vectors(into[shard]).on(self._replicas.contexts[place])
                    for _ in self._guard.passes(partial(copy_vectors, leaf)):
                        share = self._shards.leaf(work, shard, piece, variables[place], leaf)
                        kept[place].collect(leaf, share, first=shard == 0)
                    yield shard, leaf
            self._guard.check()
        finally:
            self._replicas.unmark()
            if any(_vectors(node).lent for node in into.values()):
                mx.nd.waitall()  # whoever holds the memory does not ask the engine

    def _in_turn(self, work: Work) -> Iterator[tuple[int, int, Any]]:
        """(place of the context, shard, piece): the first shard of every replica, then the second of every one."""
        places = {replica: self._place(replica) for replica in work.pieces}
        queues = [[(places[replica], *each) for each in pieces.items()] for replica, pieces in work.pieces.items()]
        for turn in zip_longest(*queues):
            yield from (each for each in turn if each is not None)

    def _place(self, replica: int) -> int:
        """Where a replica's context stands among the contexts."""
        return self._replicas.contexts.index(self._places[replica % len(self._places)])

    def _settle(self, work: Work, drawn_from: bool = False) -> None:
        """Seeds the first context anew, so that what is drawn there next does not tell who computed which shard."""
        if self._shards.seeded or drawn_from:
            settings.seed(seeds.derive("after", work.seed, work.step), self._replicas.contexts[0])

    def add(self, left: Node, right: Node | None, out: Node | None) -> Node:
        """MXNet's own addition."""
        return flat_vectors.add(left, right, out)

    def divide(self, total: Node, by: float) -> None:
        """MXNet's own division."""
        for vector in total.values():
            mx.nd._internal._div_scalar(vector, scalar=by, out=vector)

    def finish(self, nodes: Mapping[Any, Node], num_shards: int) -> Node:
        """The root on the first shard's context, added up in place."""
        total = tree.total(tree.root(num_shards), nodes, lambda left, right: self.add(left, right, left))
        assert total is not None
        return total

    def sums(self, node: Node, layout: Layout) -> Sums:
        """The field of sums as numpy; here the host waits for the step's shards."""
        field = layout.fields[-1]
        values: Sums = np.array(node[field.dtype][field.offset : field.offset + field.size].asnumpy())
        if self._work is not None:
            self._shards.check_finite(values, self._work.step)
        return values

    def update(self, total: Node, work: Work) -> None:
        """The optimizer's step with the summed gradient on the first context, and the averaged statistics."""
        self._settle(work, uses_rng.by_optimizer(self._updates.optimizer))
        self._divisor = float(work.num_examples) if self._shards.per_example else 1.0
        vectors, clip = _vectors(total), self._recipe.options.clip_norm
        factor = 1.0 if clip is None else min(1.0, clip / (self.norm(total) + 1e-6))
        gradients = [
            (index, self._given(place, gradient), classic(self._replicas.array(name)))
            for place, ((name, (index, _)), gradient) in enumerate(
                zip(self._trained.items(), vectors.gradients, strict=True)
            )
            if place in self._shards.reached
        ]
        self._updates.apply(gradients, self._divisor, factor)
        self._statistics.apply(total)
        self._replicas.share()
        self._named_state.accept()

    def _given(self, place: int, gradient: Any) -> Any:
        """The gradient as the optimizer gets it: in its parameter's type, and a copy where it may be written to."""
        if place in self._narrow:
            return gradient.astype(self._form[place][1])
        return gradient.copy() if self._updates.writes_gradients else gradient

    def averaged(self) -> list[AveragedArray]:
        """The float statistics."""
        return self._statistics.read_floats()

    def norm(self, total: Node) -> float:
        """The norm over all arrays of the gradient, before clipping."""
        return flat_vectors.norm(_vectors(total).gradients) / self._divisor

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard computed."""
        return self._shards.names.columns

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """A loss of which gluon does not say how the examples count."""
        return None if losses.find_unknown(self._loss) is None else self._judged

    def _judged(self, outputs: Any, targets: Any) -> float | None:
        return self._shards.loss(outputs, targets, self._replicas.contexts[0])

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Loss and metrics of each shard in evaluation mode."""
        if self._replicas.missing:
            self._shards.show(work, self._replicas)
        self._shards.begin(self._replicas.wide(), self._watch.may_draw())
        with self._guard.restored(), self._replicas.spread():
            found = {
                shard: self._shards.sums(work, shard, piece, self._replicas.contexts[place])
                for place, shard, piece in self._in_turn(work)
            }
        self._settle(work)
        for shard, sums in found.items():
            yield shard, sums.asnumpy()

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """The block's outputs in evaluation mode."""
        if self._replicas.missing:
            self._shards.begin(self._replicas.wide(), seeded=False)  # the initializer draws as the script has it
            shard = min(work.shards)
            self._shards.outputs(work, shard, work.shards[shard], self._replicas.contexts[0])
        self._shards.begin(self._replicas.wide(), self._watch.may_draw())
        with self._guard.restored(), self._replicas.spread():
            found = {
                shard: self._shards.outputs(work, shard, piece, self._replicas.contexts[place])
                for place, shard, piece in self._in_turn(work)
            }
        self._settle(work)
        for shard, outputs in found.items():
            yield shard, transform(outputs, inputs.host)

    def native(self, outputs: Any) -> Any:
        """Outputs as the script's kind of array on the first context."""
        return transform(outputs, lambda value: inputs.put(value, self._replicas.contexts[0], wide=True))

    # -- state

    def state(self) -> State:
        """The first replica's state, from which the others start."""
        return self._named_state.state()

    def waits_for_batch(self) -> bool:
        """Whether a parameter's shape is not known yet."""
        return bool(self._replicas.missing)

    def copies(self) -> Iterator[State]:
        """Every replica's, as it computes with it next; the optimizer's slots are there once."""
        own = self.state()
        with self._replicas.spread() as spread:
            found = {f"model.{name}": arrays for name, arrays in spread.items()}
        for place in map(self._place, range(len(self.devices))):
            yield {name: array_of(found[name][place]) if name in found else kept for name, kept in own.items()}

    def model_arrays(self) -> Mapping[str, Any]:
        """The parameters on the first context."""
        self._replicas.require()
        return {f"model.{name}": self._replicas.array(name) for name in self._replicas.parameters}

    def load(self, state: Mapping[str, Array]) -> None:
        """Takes over a whole state."""
        self._named_state.load(state)

    def numbers(self) -> list[dict[str, Any]]:
        """The optimizer's numbers; there is one group."""
        return [self._updates.numbers()]

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them into the optimizer."""
        self._updates.set_numbers(numbers[0])

    def controls(self) -> Any:
        """The optimizer's numbers."""
        return self._updates.numbers()

    def turn(self, controls: Any) -> None:
        """Takes over the script's numbers."""
        self._updates.set_numbers(controls)

    def touched(self) -> bool:
        """Whether the script wrote to the state since the last step."""
        return self._named_state.touched()

    # -- data and processes

    def host(self, value: Any) -> Any:
        """An array as numpy."""
        return inputs.host(value)

    def stage(self, piece: Any) -> Any:
        """MXNet copies when it computes."""
        return piece

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """gluon's data sets and loaders are read as any others are."""
        return None

    def num_threads(self) -> int:
        """The OpenMP threads of the engine's thread for the first context."""
        return settings.num_threads(self._replicas.contexts[0])


def _vectors(node: Node) -> Vectors:
    assert isinstance(node, Vectors)
    return node
