"""The state of model and optimizer on every device, equal to the state of the script's own objects.

What the script writes into its objects between two steps is copied to every device before the next step. A changed
array is detected by its identity: JAX arrays are immutable, so another value is another object.
"""

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lockstep.backends.base import Recipe
from lockstep.backends.jax import array_ops, devices, models, named_pytrees, optimizers
from lockstep.backends.jax.executables import Executables
from lockstep.backends.jax.flat_vectors import VectorFields
from lockstep.backends.jax.functional_model import ModelHandle
from lockstep.backends.jax.partial_sums import DeviceSum
from lockstep.core.state import ArraySpec, check_state
from lockstep.core.types import Array, LazyState, State
from lockstep.errors import StateError

_STEPS = "optimizer.steps made"  # has a space, because no field of an optax state can have this name


class JaxReplicas:
    """The state of a model and its optimizer, with a copy on every device."""

    def __init__(self, recipe: Recipe) -> None:
        self._options = recipe.options
        self._script_objects = recipe.model, recipe.optimizer
        self.model = models.adapt_model(recipe.model, optimizers.find_wrt(recipe.optimizer))
        self.optimizer = optimizers.adapt_optimizer(recipe.optimizer, getattr(self.model, "state", None))
        if isinstance(recipe.model, ModelHandle):  # its `state` reads the optimizer's state
            recipe.model.optimizer = self.optimizer
        self.rows: list[int] = []  # for each replica, the row of its device
        self.copies: list[tuple[Any, Any, Any]] = []  # for each device: params, rest, optimizer state
        self._fields: VectorFields | None = None
        self._trace_key = self.model.read_trace_key()
        self._creates_variables = not self.has_variables  # whether the first batch creates the variables
        self._num_loads = 0  # how many states were loaded
        self._pending_state: State | None = None  # a state that is loaded as soon as the variables exist
        self._last_arrays: list[Any] = []  # in the script's objects, at the last update or call of `touched`

    @property
    def has_variables(self) -> bool:
        """Whether the variables exist; a linen module may have none before the first batch."""
        return self.model.params is not None

    def spread(self, names: Sequence[str]) -> None:
        """Puts a copy of the state on each of these devices; several replicas may share a device."""
        if self.has_variables:
            self.copy_script_changes()
        trees = self.model.params, self.model.rest, self.optimizer.state
        movable = _list_jax_arrays(trees, *self._script_objects)
        state = jax.tree.map(named_pytrees.select_copy, trees)
        found = devices.find_devices(names, self._options.exact, movable)
        unique = list(dict.fromkeys(found))
        self.rows = [unique.index(device) for device in found]
        self.device = unique[0]
        self.executables = Executables(unique, self._options.exact)
        if self.has_variables:
            self.place_state(state[0], state[1], state[2], self.optimizer.steps)
        self._last_arrays = self._list_script_arrays()

    def create_variables(self, inputs: Any, key: Any) -> None:
        """Initializes a linen module's variables from the first batch's inputs, then loads a pending state."""
        groups = self.optimizer.read_hyperparams()  # the script may have set them after the pending state was given
        self.model.create_variables(inputs, key)
        self.place_state(self.model.params, self.model.rest, None, self.optimizer.steps)
        if self._pending_state is not None:
            self._load_pending(self._pending_state, groups)
        self._last_arrays = self._list_script_arrays()

    def _load_pending(self, state: State, groups: Sequence[Mapping[str, Any]]) -> None:
        """Loads the pending state, then sets these hyperparameters; a state that does not fit remains pending."""
        try:
            self.load(state)
        except StateError:
            self._drop_variables()
            self._pending_state = state
            raise
        self.set_hyperparams(groups)

    def copy_script_changes(self) -> None:
        """Copies to every device what the script has written into its model and optimizer."""
        trace_key = self.model.read_trace_key()
        if trace_key != self._trace_key:
            self.executables.drop_model()
        self._trace_key = trace_key
        if self.model.mode_flags is not None and hasattr(self, "executables"):
            self.executables.modes = json.dumps(self.model.mode_flags.read())
        changed = [self.model.read_changes(), self.optimizer.read_changes()]
        # The script may have donated arrays to which it has references to a jitted function of its own.
        if not (self.model.may_donate and self.optimizer.may_donate):
            for tree in (self.model.params, self.model.rest, self.optimizer.state):
                named_pytrees.check_not_donated(tree)
        if any(changed):
            self.place_state(self.model.params, self.model.rest, self.optimizer.state, self.optimizer.steps)

    def place_state(self, params: Any, rest: Any, state: Any, steps: int | None) -> None:
        """Puts a state on every device and into the script's objects; initializes the optimizer if `state` is None."""
        if state is None:
            self.optimizer.state = None
            self.optimizer.create_state(params)
            state = self.optimizer.state
        self.copies = self.executables.put((params, rest, state))
        self._publish(steps)

    def _publish(self, steps: int | None) -> None:
        """Writes the first device's state into the script's objects."""
        params, rest, state = self.copies[0]
        self.model.publish(params, rest)
        self.optimizer.publish(state, steps)

    def make_fields(self, room: int) -> VectorFields:
        """Returns the fields of a partial sum, created at the first call; `room` is the length of the metrics' sums."""
        if self._fields is None:
            params, rest, _ = self.copies[0]
            self._fields = VectorFields(params, rest, room)
        return self._fields

    @property
    def update_needs_loss(self) -> bool:
        """Whether an update reads the step's loss."""
        return self.optimizer.uses_loss(self.copies[0][0])

    def start_early_update(self, total: DeviceSum, differs: tuple[bool, ...]) -> None:
        """Starts the update before the sums are read, so that an accelerator need not wait for the host.

        The update donates no array of the state, because its result is dropped if the sums fail a check.
        """
        if is_asynchronous(self.device) and not self.update_needs_loss:
            total.updated = self._run_update(total, differs, None, donate_argnums=())

    def update(self, total: DeviceSum, differs: tuple[bool, ...], loss: float) -> None:
        """Makes the optimizer's step on every device; if the update was already started, uses its result."""
        copies, total.updated = total.updated, None
        if copies is None:
            # Positions in the arguments (vectors, divisor, loss, params, rest, optimizer state) of the update.
            donate_argnums = (3, 4) * self.model.may_donate + (5,) * self.optimizer.may_donate
            given = self.to_scalar(loss) if self.update_needs_loss else None
            copies = self._run_update(total, differs, given, donate_argnums)
        self.copies = copies
        self._publish(None if self.optimizer.steps is None else self.optimizer.steps + 1)
        self._last_arrays = self._list_script_arrays()

    def _run_update(
        self, total: DeviceSum, differs: tuple[bool, ...], loss: Any, donate_argnums: tuple[int, ...]
    ) -> list[Any]:
        """Returns params, rest and optimizer state of every device after the step."""
        assert self._fields is not None
        divisor = self._make_divisor(total)
        divided = divisor is not None
        update = self.executables.find_update(
            self.optimizer,
            self._fields,
            self._options.clip_norm,
            differs=differs,
            divided=divided,
            donate_argnums=donate_argnums,
        )
        copies = self._put_vectors(total)
        return [update(row, vectors, divisor, loss, *self.copies[row]) for row, vectors in enumerate(copies)]

    def norm(self, total: DeviceSum) -> float:
        """Returns the norm of the gradient after its division by the divisor."""
        assert self._fields is not None
        divisor = self._make_divisor(total)
        norm = self.executables.find_norm(self._fields, divisor is not None)
        return float(norm(0, self._put_vectors(total)[0], divisor))

    def _put_vectors(self, total: DeviceSum) -> list[dict[str, Any]]:
        """Returns the vectors of a sum, copied to each device."""
        devices = self.executables.devices
        if all(isinstance(each, jax.Array) and each.devices() == {*devices} for each in total.vectors.values()):
            shards = {dtype: each.addressable_shards for dtype, each in total.vectors.items()}
            return [  # `device_put` copies nothing here; the update needs arrays on one device, and these are on a mesh
                {dtype: jax.device_put(each[row].data, device) for dtype, each in shards.items()}
                for row, device in enumerate(devices)
            ]
        # The sum is in host memory, or on other devices than the replicas.
        return self.executables.put(dict(total.vectors))

    def _make_divisor(self, total: DeviceSum) -> Any:
        """Returns the gradient's divisor; None if the shards' means already add up to the batch's mean."""
        return None if total.divisor == 1.0 else self.to_scalar(total.divisor)

    def to_scalar(self, value: float) -> Any:
        """Returns a number in JAX's widest float dtype, as an argument for an executable."""
        return np.asarray(value, array_ops.wide())

    # -- the state, by name

    def state(self, row: int = 0) -> LazyState:
        """Returns params, rest and optimizer state by name, as the device of this row has them."""
        if not self.has_variables:
            return LazyState({} if self._pending_state is None else _copy(self._pending_state), named_pytrees.to_array)
        self.copy_script_changes()
        params, rest, optimizer_state = self.copies[row]
        state = {
            f"{prefix}.{name}": leaf
            for prefix, tree in ((self.model.params_prefix, params), ("model", rest), ("optimizer", optimizer_state))
            for name, leaf in named_pytrees.name_leaves(tree).items()
        }
        if self.optimizer.steps is not None:
            state[_STEPS] = Array(np.asarray(self.optimizer.steps), "int64")
        return LazyState(state, named_pytrees.to_array)

    def model_arrays(self) -> dict[str, Any]:
        """Returns the first device's parameters and other model arrays by name.

        Random keys are returned as their integer data.
        """
        if not self.has_variables:
            return {}
        self.copy_script_changes()
        params, rest, _ = self.copies[0]
        leaves = {
            f"{self.model.params_prefix}.{name}": leaf for name, leaf in named_pytrees.name_leaves(params).items()
        }
        leaves |= {f"model.{name}": leaf for name, leaf in named_pytrees.name_leaves(rest).items()}
        return {
            name: jax.random.key_data(leaf) if named_pytrees.is_key(leaf) else named_pytrees.select_copy(leaf)
            for name, leaf in leaves.items()
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Loads a state as soon as variables exist; raises StateError, and writes nothing, if it does not fit them."""
        if not state and self._creates_variables:  # a state from before the first batch
            self._drop_variables()
            return
        if not self.has_variables:
            self._pending_state = _copy(state)
            self.optimizer.defer_hyperparams(self.optimizer.read_saved_hyperparams(state))
            self._num_loads += 1
            return
        if self.optimizer.state is None:
            self.optimizer.create_state(self.model.params)
        check_state(state, self._read_specs(state))
        params = named_pytrees.read_state(self.model.params_prefix, self.model.params, state)
        rest = named_pytrees.read_state("model", self.model.rest, state)
        optimizer_state = named_pytrees.read_state("optimizer", self.optimizer.state, state)
        steps = state[_STEPS].data.item() if _STEPS in state else self.optimizer.steps
        self.place_state(params, rest, optimizer_state, steps)
        self._pending_state = None
        self._num_loads += 1

    def _read_specs(self, state: Mapping[str, Array]) -> dict[str, ArraySpec]:
        """Returns the shapes and dtypes that a saved state must have; its number of steps may be missing."""
        specs = named_pytrees.read_specs(self.model.params_prefix, self.model.params)
        specs |= named_pytrees.read_specs("model", self.model.rest)
        specs |= named_pytrees.read_specs("optimizer", self.optimizer.state)
        return specs | ({_STEPS: ArraySpec((), "int64")} if _STEPS in state else {})

    def _drop_variables(self) -> None:
        """Drops the variables; the next batch creates them again."""
        self.copies, self._fields, self._pending_state = [], None, None
        self.executables.drop_model()
        self.model.publish(None, {})
        self.optimizer.publish(None, self.optimizer.steps)

    def set_hyperparams(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Writes hyperparameters into the optimizer state."""
        if not self.has_variables:
            self.optimizer.defer_hyperparams(groups)
            return
        self.copy_script_changes()
        if any(groups):
            states = self.executables.put(self.optimizer.replace_hyperparams(groups))
            self.copies = [(params, rest, state) for (params, rest, _), state in zip(self.copies, states, strict=True)]
            self.optimizer.publish(self.copies[0][2], self.optimizer.steps)

    def touched(self) -> bool:
        """Returns whether the script wrote to the state, or a state was loaded, since the last call."""
        last, self._last_arrays = self._last_arrays, self._list_script_arrays()
        return len(last) != len(self._last_arrays) or any(map(operator.is_not, last, self._last_arrays))

    def _list_script_arrays(self) -> list[Any]:
        """Returns the arrays in the script's objects, and the number of loads: a load counts as a change, too."""
        return [*self.model.list_arrays(), *self.optimizer.list_arrays(), self._num_loads]


def is_asynchronous(device: Any) -> bool:
    """Returns whether the host only queues programs, which the device computes later."""
    return bool(device.platform != "cpu")


def _list_jax_arrays(*objects: Any) -> list[Any]:
    """Returns all JAX arrays in these objects, including nnx objects' counters and the integers of random keys."""
    trees = [nnx.as_pure(nnx.state(each)) if isinstance(each, nnx.Pytree) else each for each in objects]
    leaves = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]
    return [getattr(leaf, "_base_array", leaf) for leaf in leaves]


def _copy(state: Mapping[str, Array]) -> State:
    return {name: Array(np.array(data), dtype) for name, (data, dtype) in state.items()}
