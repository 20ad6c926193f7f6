"""The seam: all that Lockstep asks of a framework.

It lies below the loop and is cut per process, not per device: JAX runs one shard
on every device per call, TensorFlow all of them in one function, PyTorch has one
device in each process. A backend knows its own replicas and nothing of the
others: not how many there are, nor who computes which shard.

A *node* is what the tree adds: a mapping of accumulation type to flat vector,
`{"float32": vector, ...}`, laid out by `Layout`. A leaf is the node of one shard.
The vectors are the framework's own arrays, so that the framework's own addition
adds them. They can be sliced, which is all an exchange does with them.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lockstep.core.averaged_state import AveragedArray
from lockstep.core.layout import Layout
from lockstep.core.metrics import Column, Sums
from lockstep.core.options import Options
from lockstep.core.outputs import ShardOutputs
from lockstep.core.reduction import Criterion

Node = Mapping[str, Any]


@dataclass(frozen=True)
class Habits:
    """What a framework's users expect beside what they ask for."""

    words: str = "lockstep"  # in whose an epoch is told, or "keras"
    callbacks: tuple[Callable[[], Any], ...] = ()  # each makes one, before the script's own, in the form of Keras's
    lists: bool = False  # whether a list of arrays is several inputs or outputs, wherever it stands
    open_groups: bool = False  # whether anybody may add a hyperparameter to an optimizer's group


@dataclass(frozen=True)
class Recipe:
    """What the user gave to `wrap`: everything a replica is made of, pickled as one."""

    model: Any
    optimizer: Any
    loss: Any
    metrics: Any
    options: Options
    habits: Habits = Habits()
    keeps_outputs: bool = False  # whether metric objects in the controlling process need what the shards give


@dataclass(frozen=True)
class Work:
    """The part of one batch that this process computes.

    `pieces` holds, for each of the process's replicas, its shards that have
    examples. `num_examples` is the whole batch's. `first` reads the batch's first
    shard, where that may be another process's: what is made from the first batch is
    made from this shard.
    """

    pieces: Mapping[int, Mapping[int, Any]]
    num_examples: int
    num_shards: int
    threads: int
    seed: int
    step: int
    first: Callable[[], Any] | None = None
    summed: bool = False  # whether a loss of (outputs, targets) that does not say so itself is a sum

    @property
    def shards(self) -> dict[int, Any]:
        """The shards of all replicas of this process."""
        return {shard: piece for pieces in self.pieces.values() for shard, piece in pieces.items()}


class Array(NamedTuple):
    """One array of the state, and the name of its type; `python` for a plain number of the optimizer."""

    data: NDArray[Any]
    dtype: str


State = dict[str, Array]


class Backend(Protocol):
    """One framework in one process, with the replicas of this process's devices."""

    name: str
    versions: Mapping[str, str]  # of what computes; another version may give other bits
    devices: tuple[str, ...]

    def spread(self, devices: Sequence[str]) -> None:
        """Puts a replica on each of these devices of this process; the state stays as it is."""

    def computing(self, work: Work) -> AbstractContextManager[None]:
        """Inside, the framework computes as the promise needs; afterwards every global switch is as it was."""

    # -- one step: leaves -> (exchange) -> update

    def layout(self) -> Layout:
        """Where the gradient, buffers and sums lie in a node; the field `sums` comes last."""

    def node(self, layout: Layout, memory: memoryview | None) -> Node:
        """A node to write a leaf into: in `memory` where given, else wherever the framework likes."""

    def leaves(self, work: Work, into: Mapping[int, Node]) -> Generator[tuple[int, Node], None, None]:
        """Computes each shard alone and gives (shard, leaf) as they come; a leaf may lie in `into[shard]`."""

    def add(self, left: Node, right: Node | None, out: Node | None) -> Node:
        """left + right, in `out` where given (it may be `left`); a copy of left where right is missing."""

    def divide(self, total: Node, by: float) -> None:
        """Divides every element of the vectors, in place."""

    def finish(self, nodes: Mapping[Any, Node], num_shards: int) -> Node:
        """The root of the tree out of nodes that lie on this process's devices."""

    def sums(self, node: Node, layout: Layout) -> Sums:
        """The vector of sums of a node, on the host."""

    def update(self, total: Node, work: Work) -> None:
        """Applies the optimizer's step on every replica."""

    def norm(self, total: Node) -> float:
        """The global norm of the gradient of the step just made."""

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics in the vector of sums, as far as they are known."""

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """The loss of one shard's outputs and targets, both numpy, changing nothing; None if its reduction is known."""

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """The sums of each shard, without training."""

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """The model's outputs for each shard's inputs, without training, as numpy."""

    def native(self, outputs: Any) -> Any:
        """Outputs in numpy as the framework's own arrays, on the first replica's device."""

    # -- state, and what the script may change between steps

    def state(self) -> State:
        """Parameters, buffers and optimizer slots, by name."""

    def copies(self) -> Iterator[State]:
        """The state as each replica of this process sees it, one after the other."""

    def model_arrays(self) -> Mapping[str, Any]:
        """The first replica's parameters and buffers as the framework's own arrays, by the names of `state`.

        These are not copies: their values are those of now only until the next step.
        """

    def load(self, state: Mapping[str, Array]) -> None:
        """Takes over a whole state."""

    def numbers(self) -> list[dict[str, Any]]:
        """The optimizer's plain numbers, for each of its groups of parameters; `lr` is the learning rate."""

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Takes over such numbers; those that are not named stay."""

    def controls(self) -> Any:
        """Small things the script may turn between steps (learning rates, frozen flags, global switches)."""

    def turn(self, controls: Any) -> None:
        """Takes over the controls of the script's own process."""

    def touched(self) -> bool:
        """Whether the script has written to the state since the last step or the last time this was asked."""

    # -- data and processes

    def host(self, value: Any) -> Any:
        """The framework's own array as numpy, for travel; anything else as it is."""

    def stage(self, piece: Any) -> Any:
        """The piece as the devices want it, prepared ahead on another thread; may give it back unchanged."""

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """A `Source` for the framework's own data containers; None for anything else."""

    def num_threads(self) -> int:
        """The framework's thread count, from which the threads per shard follow."""


@runtime_checkable
class Portable(Protocol):
    """What a backend offers besides where its module's devices have a process each."""

    def dump(self) -> bytes:
        """The recipe in one pickle, for a fresh process; names the attribute that cannot be pickled."""


@runtime_checkable
class Attributed(Protocol):
    """What a backend offers besides where its models hold more than arrays that a script may turn between steps."""

    def attributes(self) -> dict[str, Any]:
        """Plain values by name, for a checkpoint: which parameters are frozen, a dropout's rate."""

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Takes over such values, all or, with an error that names both values, none."""


@runtime_checkable
class HasTrainingMode(Protocol):
    """Extra protocol for backends whose models keep their own mode, training or evaluation."""

    def enter_training_mode(self) -> None:
        """Puts a model that is in evaluation mode as a whole into training mode; parts that are apart in it stay."""


@runtime_checkable
class Deferred(Protocol):
    """Extra protocol for backends whose models may have no variables, and so no state, before their first batch."""

    def waits_for_batch(self) -> bool:
        """Whether the variables are yet to be made, by the next step or evaluation."""


@runtime_checkable
class AveragesState(Protocol):
    """Extra protocol for backends whose models have float state that shards change and the tree averages."""

    def averaged(self) -> list[AveragedArray]:
        """Such arrays as they are before this step; called once the first of its shards is computed."""


@runtime_checkable
class KeepsOutputs(Protocol):
    """Extra protocol for backends that hand outputs and targets to metric objects in the controlling process."""

    outputs: ShardOutputs  # of the shards of the last command


class Module(Protocol):
    """What a backend's module offers: its devices, and a backend over some of them."""

    joins: bool  # whether processes that somebody else launched can train together

    def available(self) -> list[str]:
        """The accelerators of this host; empty where there is only the CPU."""

    def name(self, device: Any) -> str:
        """The name (`cpu:0`) of one of the framework's own device objects."""

    def initial_seed(self) -> int:
        """The seed that the script has given the framework; 0 where that cannot be read. Draws nothing."""

    def variables(self, devices: Sequence[str]) -> Mapping[str, str]:
        """The environment variables that the framework must find before it computes on these devices."""

    def adopt(self, recipe: Recipe) -> Recipe:
        """The recipe as the trainer holds it: its model is what the script can call, and is kept up to date."""

    def open(self, recipe: Recipe, devices: Sequence[str]) -> Backend:
        """The backend over the recipe's model, with one replica on each of `devices`."""

    def processes(self, devices: Sequence[str]) -> list[list[str]]:
        """The devices that each process drives, the script's own process first."""


def arrays(values: Iterable[tuple[str, NDArray[Any]]]) -> State:
    """A state out of plain numpy arrays."""
    return {name: Array(np.ascontiguousarray(data), str(data.dtype)) for name, data in values}
