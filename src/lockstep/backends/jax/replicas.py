"""Replicas: the state of model and optimizer on every device, and the script's own objects beside it.

The script's objects are the truth. What it puts there between two steps is seen,
for JAX's arrays never change: another value is another object.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lockstep.backends.base import Array, Recipe, State
from lockstep.backends.jax import array_ops, devices, models, named_pytrees, optimizers
from lockstep.backends.jax.compiled import Executables
from lockstep.backends.jax.functional_model import Handle
from lockstep.backends.jax.lazy_sums import Total
from lockstep.backends.jax.vector_fields import Fields
from lockstep.core.state import ArraySpec, check_state
from lockstep.errors import StateError

_STEPS = "optimizer.steps made"  # no name of a field, so that no state of optax has it


class Replicas:
    """One state, a copy of it on every device."""

    def __init__(self, recipe: Recipe) -> None:
        self._options = recipe.options
        self._given = recipe.model, recipe.optimizer
        self.model = models.of(recipe.model, optimizers.wrt(recipe.optimizer))
        self.optimizer = optimizers.of(recipe.optimizer, getattr(self.model, "state", None))
        if isinstance(recipe.model, Handle):
            recipe.model.optimizer = self.optimizer
        self.rows: list[int] = []  # for each replica, the row of its device
        self.copies: list[tuple[Any, Any, Any]] = []  # parameters, other variables, optimizer's state of every device
        self._fields: Fields | None = None
        self._ahead: tuple[Total, list[Any]] | None = None  # an update that was started, and for which total
        self._signature = self.model.signature()
        self._lazy = not self.ready  # the first batch makes the variables
        self._loads = 0  # how often a state was taken over
        self._waiting: State | None = None  # one that came before the variables
        self._seen: list[Any] = []

    @property
    def ready(self) -> bool:
        """Whether the variables are there; a linen module may have none before the first batch."""
        return self.model.params is not None

    def spread(self, names: Sequence[str]) -> None:
        """A copy of the state on each of these devices; several replicas may share one."""
        if self.ready:
            self.look()
        own = _arrays((self.model.params, self.model.rest, self.optimizer.state), *self._given)
        state = jax.tree.map(named_pytrees.host, (self.model.params, self.model.rest, self.optimizer.state))
        chosen = devices.of(names, self._options.exact, own)
        unique = list(dict.fromkeys(chosen))
        self.rows = [unique.index(device) for device in chosen]
        self.device = unique[0]
        self.executables = Executables(unique, self._options.exact)
        if self.ready:
            self.take(state[0], state[1], state[2], self.optimizer.steps)
        self._seen = self._held()

    def start(self, inputs: Any, key: Any) -> None:
        """Makes a linen module's variables from the first batch's inputs, and takes over a state that waited."""
        numbers = self.optimizer.numbers()
        self.model.start(inputs, key)
        self.take(self.model.params, self.model.rest, None, self.optimizer.steps)
        if self._waiting is not None:
            self._fulfil(self._waiting, numbers)
        self._seen = self._held()

    def _fulfil(self, state: State, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the state that waited, and the numbers set last; where it does not fit, it goes on waiting."""
        try:
            self.load(state)
        except StateError:
            self._forget()
            self._waiting = state
            raise
        self.set_numbers(numbers)

    def look(self) -> None:
        """Takes over what the script has put into its own objects."""
        signature = self.model.signature()
        if signature != self._signature:
            self.executables.forget()
        self._signature = signature
        if self.model.mode_flags is not None and hasattr(self, "executables"):
            self.executables.modes = json.dumps(self.model.mode_flags.read())
        changed = [self.model.changed(), self.optimizer.changed()]
        if not (self.model.donated and self.optimizer.donated):  # what the script holds, it can give away
            for tree in (self.model.params, self.model.rest, self.optimizer.state):
                named_pytrees.check_there(tree)
        if any(changed):
            self.take(self.model.params, self.model.rest, self.optimizer.state, self.optimizer.steps)

    def take(self, params: Any, rest: Any, state: Any, steps: int | None) -> None:
        """Puts a state on every device and into the script's own objects."""
        self._ahead = None
        if state is None:
            self.optimizer.state = None
            self.optimizer.start(params)
            state = self.optimizer.state
        self.copies = self.executables.put((params, rest, state))
        self._publish(steps)

    def _publish(self, steps: int | None) -> None:
        """Brings the script's own objects up to date."""
        params, rest, state = self.copies[0]
        self.model.publish(params, rest)
        self.optimizer.publish(state, steps)

    def fields(self, room: int) -> Fields:
        """Where everything lies in a node; made once."""
        if self._fields is None:
            params, rest, _ = self.copies[0]
            self._fields = Fields(jax.tree.map(_form, params), jax.tree.map(_form, rest), room)
        return self._fields

    @property
    def sums_matter(self) -> bool:
        """Whether an update looks at the step's loss."""
        return self.optimizer.asks_for_loss(self.copies[0][0])

    def expect(self, total: Total, copies: list[Any]) -> None:
        """Notes the state to which the update with this total will lead."""
        self._ahead = total, copies

    def anticipate(self, total: Total, differs: tuple[bool, ...]) -> None:
        """Starts the update before the sums are read, so that an accelerator need not wait for the host.

        Nothing of the state is given away for it: should the sums speak against the step, what it gave is dropped.
        """
        self._ahead = None
        if runs_ahead(self.device) and not self.sums_matter:
            self.expect(total, self._updated(total, differs, None, donated=()))

    def arrive(self, total: Total) -> bool:
        """Takes over the update that was started for this total; whether there was one."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] is not total:
            return False
        self._advance(ahead[1])
        return True

    def update(self, total: Total, differs: tuple[bool, ...], loss: float) -> None:
        """One step of the optimizer on every device."""
        donated = (3, 4) * self.model.donated + (5,) * self.optimizer.donated
        given = self.scalar(loss) if self.sums_matter else None
        self._advance(self._updated(total, differs, given, donated))

    def _advance(self, copies: list[Any]) -> None:
        self.copies = copies
        steps = self.optimizer.steps
        self._publish(None if steps is None else steps + 1)
        self._seen = self._held()

    def _updated(self, total: Total, differs: tuple[bool, ...], loss: Any, donated: tuple[int, ...]) -> list[Any]:
        """Parameters, other variables and optimizer's state of every device, one step on."""
        assert self._fields is not None
        divisor = self._divisor(total)
        update = self.executables.update(
            self.optimizer,
            self._fields,
            self._options.clip_norm,
            differs=differs,
            divided=divisor is not None,
            donated=donated,
        )
        return [
            update(row, vectors, divisor, loss, *self.copies[row]) for row, vectors in enumerate(self._vectors(total))
        ]

    def norm(self, total: Total) -> float:
        """The norm of the gradient, divided as the update divides it."""
        assert self._fields is not None
        divisor = self._divisor(total)
        norm = self.executables.norm(self._fields, divisor is not None)
        return float(norm(0, self._vectors(total)[0], divisor))

    def _vectors(self, total: Total) -> list[dict[str, Any]]:
        """A node's vectors, for every device."""
        devices = self.executables.devices
        if all(isinstance(each, jax.Array) and each.devices() == {*devices} for each in total.vectors.values()):
            shards = {dtype: each.addressable_shards for dtype, each in total.vectors.items()}
            return [  # put there, where they are already, because of one device it is told that it is a mesh
                {dtype: jax.device_put(each[row].data, device) for dtype, each in shards.items()}
                for row, device in enumerate(devices)
            ]
        return self.executables.put(dict(total.vectors))

    def _divisor(self, total: Total) -> Any:
        """What the gradient is divided by; None where the shards' means already add up to the batch's."""
        return None if total.divisor == 1.0 else self.scalar(total.divisor)

    def scalar(self, value: float) -> Any:
        """A number as an argument of an executable."""
        return np.asarray(value, array_ops.wide())

    # -- the state, by name

    def state(self, row: int = 0) -> State:
        """Parameters, what else the model keeps, and the optimizer's state, as one device has them."""
        if not self.ready:
            return {} if self._waiting is None else _copied(self._waiting)
        self.look()
        params, rest, slots = self.copies[row]
        state = named_pytrees.to_state(self.model.home, params) | named_pytrees.to_state("model", rest)
        state |= named_pytrees.to_state("optimizer", slots)
        if self.optimizer.steps is not None:
            state[_STEPS] = Array(np.asarray(self.optimizer.steps), "int64")
        return state

    def model_arrays(self) -> dict[str, Any]:
        """Parameters and what else the model keeps, as the first device has them; a random key as its numbers."""
        if not self.ready:
            return {}
        self.look()
        params, rest, _ = self.copies[0]
        leaves = {f"{self.model.home}.{name}": leaf for name, leaf in named_pytrees.named(params).items()}
        leaves |= {f"model.{name}": leaf for name, leaf in named_pytrees.named(rest).items()}
        return {
            name: jax.random.key_data(leaf) if named_pytrees.is_key(leaf) else named_pytrees.host(leaf)
            for name, leaf in leaves.items()
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Takes over a whole state; one that does not fit changes nothing. Without variables it waits for them."""
        if not state and self._lazy:
            self._forget()
            return
        if not self.ready:
            self._waiting = _copied(state)
            self.optimizer.want(self.optimizer.numbers_in(state))
            self._loads += 1
            return
        if self.optimizer.state is None:
            self.optimizer.start(self.model.params)
        check_state(state, self._specs(state))
        params = named_pytrees.from_state(self.model.home, self.model.params, state)
        rest = named_pytrees.from_state("model", self.model.rest, state)
        slots = named_pytrees.from_state("optimizer", self.optimizer.state, state)
        steps = state[_STEPS].data.item() if _STEPS in state else self.optimizer.steps
        self.take(params, rest, slots, steps)
        self._waiting = None
        self._loads += 1

    def _specs(self, state: Mapping[str, Array]) -> dict[str, ArraySpec]:
        """Describe the arrays that a saved state must have; the number of steps may be missing."""
        specs = named_pytrees.read_specs(self.model.home, self.model.params)
        specs |= named_pytrees.read_specs("model", self.model.rest)
        specs |= named_pytrees.read_specs("optimizer", self.optimizer.state)
        return specs | ({_STEPS: ArraySpec((), "int64")} if _STEPS in state else {})

    def _forget(self) -> None:
        """Back to before the first batch, which will make the variables anew."""
        self.copies, self._fields, self._waiting = [], None, None
        self.executables.forget()
        self.model.publish(None, {})
        self.optimizer.publish(None, self.optimizer.steps)

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes plain numbers into the optimizer's state."""
        if not self.ready:
            self.optimizer.want(numbers)
            return
        self.look()
        if any(numbers):
            fresh = self.executables.put(self.optimizer.with_numbers(numbers))
            self.copies = [(params, rest, slots) for (params, rest, _), slots in zip(self.copies, fresh, strict=True)]
            self.optimizer.publish(self.copies[0][2], self.optimizer.steps)

    def touched(self) -> bool:
        """Whether the script has written to the state, or a state was taken over, since the last look."""
        seen, self._seen = self._seen, self._held()
        return len(seen) != len(self._seen) or any(
            one is not other for one, other in zip(seen, self._seen, strict=True)
        )

    def _held(self) -> list[Any]:
        return [*self.model.held(), *self.optimizer.held(), self._loads]


def runs_ahead(device: Any) -> bool:
    """Whether the host tells the device what to do long before it is done."""
    return bool(device.platform != "cpu")


def _arrays(*objects: Any) -> list[Any]:
    """All arrays of these objects, as JAX lists them: an nnx module's and its optimizer's counters, keys as numbers."""
    nests = [nnx.as_pure(nnx.state(each)) if isinstance(each, nnx.Pytree) else each for each in objects]
    leaves = [leaf for leaf in jax.tree.leaves(nests) if isinstance(leaf, jax.Array)]
    return [getattr(leaf, "_base_array", leaf) for leaf in leaves]


def _copied(state: Mapping[str, Array]) -> State:
    return {name: Array(np.array(data), dtype) for name, (data, dtype) in state.items()}


def _form(leaf: Any) -> Any:
    form: Any = jax.ShapeDtypeStruct
    return form(leaf.shape, leaf.dtype)
