"""One replica of a toynet model in one process: see `lockstep.backends.base.Backend`."""

from contextlib import contextmanager

import cloudpickle
import numpy as np
import toynet

from lockstep.backends.change_detector import ChangeDetector
from lockstep.core import host_vectors, seeds
from lockstep.core.batch_entries import call_model
from lockstep.core.batches import is_array, transform
from lockstep.core.layout import Layout
from lockstep.core.metrics import FIRST_METRIC, resolve
from lockstep.core.named_metrics import NamedMetrics
from lockstep.core.objective import Objective
from lockstep.core.outputs import ShardOutputs, select_outputs
from lockstep.core.shard_sums import NUM_CHECKS, ShardNames, ShardSums, check_loss, find_room, measure, pad
from lockstep.core.state import MODEL, OPTIMIZER, ArraySpec, check_state
from lockstep.core.types import LazyState, to_array
from lockstep.core.weighing import Share
from lockstep.errors import ModelError, OptimizerError
from lockstep_toynet import array_ops
from lockstep_toynet.losses import OWN, choose_term, find_traits


class ToynetBackend:
    name = "toynet"
    recipe_version = 0
    versions = {"toynet": toynet.__version__, "numpy": np.__version__}  # noqa: RUF012 - as the protocol has it

    def __init__(self, recipe, devices):
        if not isinstance(recipe.optimizer, toynet.SGD):
            raise OptimizerError(f"The optimizer of a toynet model is a toynet.SGD. Got {recipe.optimizer!r}.")
        if recipe.options.precision is not None:
            raise ModelError(f"toynet computes in float64. Got precision={recipe.options.precision!r}. Leave it out.")
        self.devices = tuple(devices)
        self._recipe, self._model, self._optimizer = recipe, recipe.model, recipe.optimizer
        self._compute_term = choose_term(recipe.loss)
        self._metrics = resolve(recipe.metrics, NamedMetrics(array_ops, find_traits(recipe.loss)).functions())
        self.outputs = ShardOutputs(recipe.keeps_outputs, self.host)
        self._names = ShardNames()
        parameters = [(name, str(each.dtype), each.shape) for name, each in self._model.parameters.items()]
        self._room = FIRST_METRIC + find_room(self._metrics, recipe.loss)
        self._layout = Layout.build(parameters, [], self._room + NUM_CHECKS)
        self._changes = ChangeDetector(lambda: [array.data.tobytes() for array in self.state().values()])

    def spread(self, devices):
        """Does nothing, because each process has one device."""

    @contextmanager
    def computing(self, work):
        """Restores what `partial_sums`, `evaluate` and `forward` set for the whole process."""
        generator = toynet.generator
        try:
            yield
        finally:
            toynet.generator, self._model.training = generator, False

    # -- one step

    def layout(self):
        return self._layout

    def partial_sums(self, work, fold):
        self._names.begin()
        self._model.training = True
        rows = {}
        for shard, piece in work.shards.items():  # in ascending order
            for parameter in self._model.parameters.values():
                parameter.gradient = None
            term, sums = self._compute(work, shard, piece, alone=work.num_shards == 1)
            rows[shard] = pad(sums, self._layout.num_sums, self._names.checks())
            if term.contributes:  # a shard whose targets are all ignored has a gradient of zeros, not 0 / 0
                term.root.backward()
            buffer = fold.get_buffer(shard)  # holds numbers of an earlier shard: every array is written
            for name, view in self._view_gradients(buffer).items():
                gradient = self._model.parameters[name].gradient
                view[...] = 0 if gradient is None else gradient
            fold.push(shard, buffer)

        def read():  # a framework that computes asynchronously waits for its device here
            for shard, row in rows.items():
                check_loss(row, work.step, shard)
            return rows

        return fold.partial_sums(), ShardSums(read, self._names.check)

    def create_buffer(self, layout, memory):
        return host_vectors.create_buffer(layout, memory)

    def add(self, left, right, out):
        return host_vectors.add(left, right, out)

    def divide(self, total, by):
        host_vectors.divide(total, by)

    def update(self, total, sums, work):
        clip = self._recipe.options.clip_norm
        factor = 1.0 if clip is None else min(1.0, clip / (self.norm(total) + 1e-6))
        for name, gradient in self._view_gradients(total).items():
            self._model.parameters[name].gradient = gradient * factor
        self._optimizer.step()
        self._changes.accept()

    def norm(self, total):
        return float(np.sqrt(sum(float((each**2).sum()) for each in self._view_gradients(total).values())))

    @property
    def columns(self):
        return self._names.columns

    def _compute(self, work, shard, piece, alone):
        """Returns the loss of one shard, weighed by its part of the batch, and the sums of loss and metrics."""
        toynet.generator = np.random.default_rng(seeds.shard(work.seed, work.step, shard))
        examples = work.count(shard)
        share = Share(examples, examples / work.num_examples, alone, work.summed)
        term = self._compute_term(self._model, _copy(piece), share)
        self.outputs.keep(work, shard, select_outputs(term, self.outputs.wanted), examples)
        parts, columns = measure(array_ops, self._metrics, term, examples)
        self._names.add(columns)
        sums = np.concatenate([np.ravel(np.asarray(value, "float64")) * times for value, times in parts])
        return term, sums

    def _view_gradients(self, partial_sum):
        return {field.name: host_vectors.view(partial_sum, field) for field in self._layout.fields}

    # -- forward only

    @property
    def criterion(self):
        loss = self._recipe.loss
        return None if isinstance(loss, (Objective, *OWN)) else self._judge

    def _judge(self, outputs, targets):
        value = self._recipe.loss(toynet.Array(outputs), toynet.Array(targets))
        return None if value.shape else float(value.values)

    def evaluate(self, work):
        self._names.begin()
        for shard, piece in work.shards.items():
            yield shard, pad(self._compute(work, shard, piece, alone=False)[1], self._room)

    def forward(self, work):
        for shard, piece in work.shards.items():
            yield shard, transform(call_model(self._model, _copy(piece)), self.host)

    def native(self, outputs):
        return transform(outputs, toynet.Array)

    # -- state

    def state(self):
        return dict(self._read_state())

    def copies(self):
        yield self._read_state()

    def _read_state(self):
        own = {name: array.values for name, array in self.model_arrays().items()}
        own |= {f"{OPTIMIZER}{name}.momentum": value for name, value in self._optimizer.velocities.items()}
        return LazyState(own, to_array)

    def model_arrays(self):
        return {f"{MODEL}{name}": array for name, array in self._model.parameters.items()}

    def load(self, state):
        own = {name: ArraySpec(array.shape, str(array.dtype)) for name, array in self.model_arrays().items()}
        slots = {name: f"{OPTIMIZER}{name}.momentum" for name in self._model.parameters}
        if any(name.startswith(OPTIMIZER) for name in state):  # there is no momentum before the first step
            own |= {slot: own[f"{MODEL}{name}"] for name, slot in slots.items()}
        check_state(state, own)  # before anything is written
        for name, array in self.model_arrays().items():
            array.values[...] = state[name].data
        self._optimizer.velocities = {name: state[slot].data.copy() for name, slot in slots.items() if slot in own}

    def numbers(self):
        return [{"lr": self._optimizer.lr, "momentum": self._optimizer.momentum}]

    def set_numbers(self, numbers):
        for name, value in numbers[0].items():
            setattr(self._optimizer, name, value)

    def controls(self):
        return self.numbers()

    def turn(self, controls):
        self.set_numbers(controls)

    def touched(self):
        return self._changes.has_changed()

    # -- data and processes

    def host(self, value):
        return np.array(value.values) if isinstance(value, toynet.Array) else value

    def stage(self, piece):
        return piece

    def source(self, data, batch_size, shuffle, seed):
        return None

    def num_threads(self):
        return 1

    def dump(self):
        return cloudpickle.dumps(self._recipe)


def _copy(piece):
    """Copies a shard's arrays into memory of their own, because kernels may choose their code by the alignment."""
    return transform(piece, lambda value: toynet.Array(np.array(value)) if _has_examples(value) else value)


def _has_examples(value):
    return is_array(value) or isinstance(value, list)
