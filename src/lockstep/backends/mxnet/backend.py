"""The MXNet backend: all replicas of a gluon block, driven from one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mxnet as mx
from mxnet import autograd

from lockstep.backends.base import Recipe
from lockstep.backends.mxnet import array_ops, flat_vectors, inputs, losses, running_stats, settings, uses_rng
from lockstep.backends.mxnet.arrays import as_nd, get_dtype, to_array
from lockstep.backends.mxnet.attribute_guard import AttributeGuard
from lockstep.backends.mxnet.flat_vectors import ContextVectors
from lockstep.backends.mxnet.optimizer import OptimizerAdapter
from lockstep.backends.mxnet.replicas import Replicas
from lockstep.backends.mxnet.running_stats import RunningStats
from lockstep.backends.mxnet.shard_pass import MxnetShardRunner
from lockstep.backends.mxnet.state import NamedState
from lockstep.backends.mxnet.unsupported import check_graphs, check_optimizer, check_recipe
from lockstep.core import seeds
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.batches import transform
from lockstep.core.fold import Fold
from lockstep.core.layout import Layout
from lockstep.core.loss_reduction import Criterion
from lockstep.core.metrics import Column, Sums, resolve
from lockstep.core.named_metrics import NamedMetrics
from lockstep.core.outputs import ShardOutputs
from lockstep.core.shard_sums import ShardSums
from lockstep.core.tree import Span
from lockstep.core.types import Array, LazyState, PartialSum, Phases, State, Work


class MxnetBackend:
    """One replica of a gluon block for each device; several replicas may share a context."""

    name = "mxnet"
    versions: Mapping[str, str] = {"mxnet": mx.__version__}

    def __init__(self, recipe: Recipe, devices: Sequence[str]) -> None:
        check_recipe(recipe)
        self.devices = tuple(devices)
        self._recipe = recipe
        self._replicas = Replicas(recipe.model, devices)
        self._optimizer = OptimizerAdapter(recipe.optimizer, self._replicas.parameters)
        if recipe.options.exact:
            check_optimizer(self._optimizer.optimizer)
        self._named_state = NamedState(self._replicas, self._optimizer)
        self._loss = losses.resolve(recipe.loss)
        self.outputs = ShardOutputs(recipe.keeps_outputs, inputs.to_numpy, inputs.to_cpu)
        named = NamedMetrics(array_ops, losses.find_traits(self._loss)).functions()
        self._shards = MxnetShardRunner(recipe.model, self._loss, resolve(recipe.metrics, named), self.outputs)
        self._statistics = RunningStats(self._replicas)
        self._draws = uses_rng.DrawDetector(recipe.model, self._loss)
        self._guard = AttributeGuard(recipe.model, self._loss) if recipe.options.exact else AttributeGuard()
        self._trained: dict[str, tuple[int, Any]] = {}
        self._layout: Layout | None = None
        self._dtypes: Any = None
        self._narrow: frozenset[int] = frozenset()  # trained parameters with a shorter dtype than their layout field
        self._work: Work | None = None  # what is computed now; parameters may get their shapes from its examples
        self._divisor = 1.0  # the number by which the update divides the gradient

    def spread(self, devices: Sequence[str]) -> None:
        """Moves the replicas to other contexts; the script's block itself is on the first context."""
        self.devices = tuple(devices)
        self._replicas.move(devices)
        self._statistics.forget()

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """Opens a context with the run's number of threads, in which the script's `autograd.record()` is paused."""
        check_graphs(self._recipe.model)
        self._work = work
        try:
            with settings.use_threads(work.threads, self._replicas.contexts), autograd.pause():
                yield
        finally:
            self._work = None

    # -- one step

    def layout(self) -> Layout:
        """Returns the layout of a partial sum, which changes if other parameters are trained or types have changed."""
        if self._replicas.uninitialized and self._work is not None:
            self._shards.infer_shapes(self._work, self._replicas)
        self._replicas.check_initialized()
        self._trained = self._replicas.trained = self._optimizer.find_trained()
        averaged = running_stats.find_names(self._recipe.model, self._replicas.parameters)
        form = [(name, get_dtype(self._replicas.parameters[name])) for name in (*self._trained, *averaged)]
        if self._layout is None or form != self._dtypes:
            gradients = [self._replicas.describe_field(name) for name in self._trained]
            others = running_stats.list_fields([self._replicas.describe_field(name) for name in averaged])
            self._layout = Layout.build(gradients, others, self._shards.num_sums)
            self._dtypes = form
            fields = self._layout.fields[: len(self._trained)]
            kinds = [kind for _, kind in form[: len(fields)]]
            self._narrow = frozenset(
                index for index, (field, kind) in enumerate(zip(fields, kinds, strict=True)) if field.dtype != kind
            )
            self._statistics.set_layout(averaged, self._layout)
        return self._layout

    def create_buffer(self, layout: Layout, memory: memoryview | None) -> PartialSum:
        """Creates vectors in the given memory, or else vectors that are allocated when a shard writes to them."""
        if memory is None:
            return ContextVectors(layout, len(self._trained))
        return flat_vectors.wrap_memory(memory, layout, len(self._trained))

    def partial_sums(self, work: Work, fold: Fold) -> tuple[Mapping[Span, PartialSum], ShardSums]:
        """Queues all shards in MXNet's engine, in turn over the contexts; restores the block's running statistics."""
        self._shards.begin(self._replicas.is_double(), self._draws.may_draw(), self._narrow)
        self._guard.begin(work.num_shards)
        try:
            with self._replicas.spread() as spread, self._statistics.isolate(spread) as stats:
                variables = [[spread[name][index] for name in self._trained] for index in range(len(stats))]
                for index, shard, piece in self._replicas.interleave(work.pieces):
                    leaf = _as_vectors(fold.get_buffer(shard)).allocate_on(self._replicas.contexts[index])
                    for _ in self._guard.passes(partial(self._shards.copy_results, shard, leaf)):
                        share = self._shards.train(work, shard, piece, variables[index], leaf)
                        stats[index].collect(leaf, share, first=shard == 0)
                    fold.push(shard, leaf)
            self._guard.check()
        finally:
            self._replicas.restore_gradients()
        partial_sums = fold.partial_sums()
        if any(_as_vectors(each).has_given_memory for each in partial_sums.values()):
            mx.nd.waitall()  # other processes read this memory without MXNet's engine
        return partial_sums, ShardSums(lambda: self._shards.read_finite_sums(work.step))

    def _reseed(self, work: Work, always: bool = False) -> None:
        """Seeds the first context, so that the next draw there does not depend on which shards it has computed."""
        if self._shards.seeded or always:
            settings.seed(seeds.derive("after", work.seed, work.step), self._replicas.contexts[0])

    def add(self, left: PartialSum, right: PartialSum | None, out: PartialSum | None) -> PartialSum:
        """Returns left + right, added by MXNet, in `out` if given; copies `left` if `right` is None."""
        return flat_vectors.add(left, right, out)

    def divide(self, total: PartialSum, by: float) -> None:
        """Divides every element of the sum in place."""
        for vector in total.values():
            mx.nd._internal._div_scalar(vector, scalar=by, out=vector)

    def update(self, total: PartialSum, sums: Sums, work: Work) -> None:
        """Makes the optimizer's step on the first context, and writes the averaged running statistics there."""
        self._reseed(work, uses_rng.may_optimizer_draw(self._optimizer.optimizer))
        self._divisor = float(work.num_examples) if self._shards.per_example else 1.0
        vectors, clip = _as_vectors(total), self._recipe.options.clip_norm
        factor = 1.0 if clip is None else min(1.0, clip / (self.norm(total) + 1e-6))
        gradients = [
            (index, self._prepare_gradient(position, gradient), as_nd(self._replicas.get_array(name)))
            for position, ((name, (index, _)), gradient) in enumerate(
                zip(self._trained.items(), vectors.gradients, strict=True)
            )
            # The script may have given a gradient where no shard had one.
            if position in self._shards.reached or (work.phases is Phases.UPDATE and gradient.asnumpy().any())
        ]
        self._optimizer.apply(gradients, self._divisor, factor)
        self._statistics.apply(total)
        self._replicas.copy_to_script_contexts()
        self._named_state.accept()

    def _prepare_gradient(self, position: int, gradient: Any) -> Any:
        """Returns the gradient in its parameter's dtype, as a copy if the optimizer may write to the gradient."""
        if position in self._narrow:
            return gradient.astype(self._dtypes[position][1])
        return gradient.copy() if self._optimizer.writes_gradients else gradient

    def averaged(self) -> list[AveragedArray]:
        """Returns copies of the running statistics that are floats."""
        return self._statistics.read_floats()

    def norm(self, total: PartialSum) -> float:
        """Returns the norm of all gradients together, before clipping."""
        return flat_vectors.compute_norm(_as_vectors(total).gradients) / self._divisor

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard that was computed."""
        return self._shards.names.columns

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """The loss as a function of (outputs, targets); None if its reduction is known from its class."""
        return None if losses.find_unknown(self._loss) is None else self._compute_loss

    def _compute_loss(self, outputs: Any, targets: Any) -> float | None:
        return self._shards.compute_loss(outputs, targets, self._replicas.contexts[0])

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Yields each shard's loss and metrics, computed in evaluation mode."""
        if self._replicas.uninitialized:
            self._shards.infer_shapes(work, self._replicas)
        self._compute_shards(work, self._shards.evaluate)
        yield from self._shards.read_sums().items()

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """Yields each shard's outputs, computed in evaluation mode."""
        if self._replicas.uninitialized:
            self._shards.begin(self._replicas.is_double(), seeded=False)  # initializers draw from the script's seed
            shard = min(work.shards)
            self._shards.predict(work, shard, work.shards[shard], self._replicas.contexts[0])
        for shard, outputs in self._compute_shards(work, self._shards.predict).items():
            yield shard, transform(outputs, inputs.to_numpy)

    def _compute_shards(self, work: Work, compute: Callable[[Work, int, Any, Any], Any]) -> dict[int, Any]:
        """Queues every shard in the engine, in evaluation mode, and returns the results by shard."""
        self._shards.begin(self._replicas.is_double(), self._draws.may_draw())
        with self._guard.restore_afterwards(), self._replicas.spread():
            results = {
                shard: compute(work, shard, piece, self._replicas.contexts[index])
                for index, shard, piece in self._replicas.interleave(work.pieces)
            }
        self._reseed(work)
        return results

    def native(self, outputs: Any) -> Any:
        """Returns outputs as MXNet arrays on the first context."""
        return transform(outputs, lambda value: inputs.put(value, self._replicas.contexts[0], wide=True))

    # -- state

    def state(self) -> State:
        """Returns a copy of the first replica's state, which is copied to the other replicas before each step."""
        return dict(self._named_state.state())

    def waits_for_batch(self) -> bool:
        """Returns whether a parameter gets its shape from the first batch."""
        return bool(self._replicas.uninitialized)

    def copies(self) -> Iterator[LazyState]:
        """Yields every replica's parameters as it computes with them next, each with the one optimizer state."""
        own = self._named_state.arrays()
        with self._replicas.spread() as spread:
            found = {f"model.{name}": arrays for name, arrays in spread.items()}
        for index in map(self._replicas.find_context_index, range(len(self.devices))):
            yield LazyState(own | {name: arrays[index] for name, arrays in found.items()}, to_array)

    def model_arrays(self) -> Mapping[str, Any]:
        """Returns the parameters on the first context, by name."""
        self._replicas.check_initialized()
        return {f"model.{name}": self._replicas.get_array(name) for name in self._replicas.parameters}

    def load(self, state: Mapping[str, Array]) -> None:
        """Writes a state into block and optimizer; raises StateError, and writes nothing, if it does not fit them."""
        self._named_state.load(state)

    def numbers(self) -> list[dict[str, Any]]:
        """Returns the optimizer's hyperparameters as a list of one group."""
        return [self._optimizer.read_hyperparameters()]

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Sets the optimizer's hyperparameters."""
        self._optimizer.set_hyperparameters(numbers[0])

    def controls(self) -> Any:
        """Returns the optimizer's hyperparameters."""
        return self._optimizer.read_hyperparameters()

    def turn(self, controls: Any) -> None:
        """Sets the optimizer's hyperparameters to those of the script's process."""
        self._optimizer.set_hyperparameters(controls)

    def touched(self) -> bool:
        """Returns whether the script has written to the state since the last step."""
        return self._named_state.has_changed()

    # -- data and processes

    def host(self, value: Any) -> Any:
        """Returns an MXNet array as numpy, and any other value as it is."""
        return inputs.to_numpy(value)

    def stage(self, piece: Any) -> Any:
        """Returns the shard's examples as they are, because they are copied when the shard is computed."""
        return piece

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """Returns None, because gluon's data sets and loaders need no source of their own."""
        return None

    def num_threads(self) -> int:
        """Returns the number of OpenMP threads of the first context."""
        return settings.read_num_threads(self._replicas.contexts[0])


def _as_vectors(node: PartialSum) -> ContextVectors:
    assert isinstance(node, ContextVectors)
    return node
