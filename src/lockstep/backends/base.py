"""The backend protocol: the methods through which Lockstep uses a framework.

A backend is one framework in one process, with all devices of that process: JAX runs one shard on every device per
call, TensorFlow runs all shards in one function, and PyTorch has one device in each process. A backend only knows its
own replicas. It does not know how many replicas other processes have, nor which process computes which shard.

The types of the arguments and results are in `core/types.py`. The vectors of a `PartialSum` are the framework's own
arrays, which an exchange only slices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.core.averaged_state import AveragedArray
from lockstep.core.fold import Fold
from lockstep.core.layout import Layout
from lockstep.core.loss_reduction import Criterion
from lockstep.core.metrics import Column, Sums
from lockstep.core.options import Options
from lockstep.core.outputs import ShardOutputs
from lockstep.core.shard_sums import ShardSums
from lockstep.core.tree import Span
from lockstep.core.types import Array, PartialSum, State, Work


@dataclass(frozen=True)
class Habits:
    """Conventions of a framework that its users expect."""

    words: str = "lockstep"  # whose words an epoch's report uses: "lockstep" or "keras"
    callbacks: tuple[Callable[[], Any], ...] = ()  # each creates a Keras callback, which runs before the script's
    lists: bool = False  # whether a list of arrays is always several inputs or outputs
    open_groups: bool = False  # whether the script may add hyperparameters to an optimizer's group


@dataclass(frozen=True)
class Recipe:
    """The arguments of `wrap` from which a replica is created; pickled as one object."""

    model: Any
    optimizer: Any
    loss: Any
    metrics: Any
    options: Options
    habits: Habits = Habits()
    keeps_outputs: bool = False  # whether metric objects in the controller need the shards' outputs


class Backend(Protocol):
    """One framework in one process, with the replicas of this process's devices.

    What a shard's loss weighs, its metrics and its row of sums come from `core/weighing.py`, `core/named_metrics.py`
    and `core/shard_sums.py`. A backend that cannot do what `recipe.options` asks for, e.g. a precision, must raise.
    """

    name: str
    versions: Mapping[str, str]  # of the libraries that compute; another version may give other bits
    devices: tuple[str, ...]

    def spread(self, devices: Sequence[str]) -> None:
        """Puts a replica on each of these devices of this process; the state does not change."""

    def computing(self, work: Work) -> AbstractContextManager[None]:
        """Returns a context in which the framework computes reproducibly; on exit it restores every global setting."""

    # -- one step: partial_sums -> (exchange) -> update

    def layout(self) -> Layout:
        """Returns the positions of gradients and buffers in a partial sum; the same object until they change."""

    def partial_sums(self, work: Work, fold: Fold) -> tuple[Mapping[Span, PartialSum], ShardSums]:
        """Computes each shard alone; returns this process's partial sums and the sums of its shards.

        Every shard starts from the same state, from a seed of its own (`core/seeds.py`) and from copies of its arrays,
        because kernels choose their path by alignment. Afterwards the state is as before. A framework that runs
        operation by operation fills every element of `fold.get_buffer(shard)`, pushes the buffer, and returns
        `fold.partial_sums()`. A framework that compiles the tree does not use the fold, and returns the spans itself. A
        framework that computes in the background need not wait here: the code that reads the sums waits.
        """

    def create_buffer(self, layout: Layout, memory: memoryview | None) -> PartialSum:
        """Creates vectors for a partial sum: in `memory` if given, else in memory of the framework's choice."""

    def add(self, left: PartialSum, right: PartialSum | None, out: PartialSum | None) -> PartialSum:
        """Returns left + right, in `out` if given (which may be `left`); copies `left` if `right` is None."""

    def divide(self, total: PartialSum, by: float) -> None:
        """Divides every element of a partial sum by a number, in place."""

    def update(self, total: PartialSum, sums: Sums, work: Work) -> None:
        """Makes the optimizer's step on every replica; `sums` are the loss, weight and metrics of the whole batch."""

    def norm(self, total: PartialSum) -> float:
        """Returns the global norm of the last step's gradient."""

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics in the vector of sums; they may not be known before the first shard."""

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """The loss as a function of numpy outputs and targets, without side effects; None if its reduction is known."""

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Yields every shard's sums (loss, weight and metrics), computed in evaluation mode."""

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """Yields every shard's outputs in numpy, computed in evaluation mode."""

    def native(self, outputs: Any) -> Any:
        """Copies outputs from numpy to the framework's own arrays, on the first replica's device."""

    # -- state, and what the script may change between steps

    def state(self) -> State:
        """Returns a copy of parameters, buffers and optimizer state, by name."""

    def copies(self) -> Iterator[Mapping[str, Array]]:
        """Yields the state of each replica of this process, with arrays that are copied when read (`LazyState`)."""

    def model_arrays(self) -> Mapping[str, Any]:
        """Returns the first replica's parameters and buffers as the framework's own arrays, by the names of `state`.

        These are not copies: the next step may change their values.
        """

    def load(self, state: Mapping[str, Array]) -> None:
        """Writes a complete state to every replica."""

    def numbers(self) -> list[dict[str, Any]]:
        """Returns the hyperparameters of each of the optimizer's groups; `lr` is the learning rate."""

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Sets hyperparameters; hyperparameters that are not named keep their values."""

    def controls(self) -> Any:
        """Returns the settings that the script may change between steps, e.g. learning rates and frozen parameters.

        The same object is returned again only if nothing has changed.
        """

    def turn(self, controls: Any) -> None:
        """Applies the settings that `controls` has returned in the script's own process."""

    def touched(self) -> bool:
        """Returns whether the script has written to the state since the last step or the last call."""

    # -- data and processes

    def host(self, value: Any) -> Any:
        """Copies one of the framework's arrays to numpy, so that it can be sent; returns any other value as it is."""

    def stage(self, piece: Any) -> Any:
        """Prepares a shard's examples for the devices, on another thread before the step; may return them unchanged."""

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """Returns a `Source` that reads the framework's own data sets and loaders; None for any other data."""

    def num_threads(self) -> int:
        """Returns the framework's number of threads, from which the threads per shard follow."""


@runtime_checkable
class Portable(Protocol):
    """Extra protocol for backends that use one process per device."""

    recipe_version: int  # another number once `dump` returns something that no other call sends to the workers

    def dump(self) -> bytes:
        """Pickles the recipe for a worker; raises an error that names the attribute if one cannot be pickled."""


@runtime_checkable
class Attributed(Protocol):
    """Extra protocol for backends whose models have settings, besides their arrays, that a script may change."""

    def attributes(self) -> dict[str, Any]:
        """Returns the model's settings by name for a checkpoint, e.g. frozen parameters or the rate of a dropout."""

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Sets all of these settings, or none: raises an error with both values if a setting cannot be set."""


@runtime_checkable
class HasTrainingMode(Protocol):
    """Extra protocol for backends whose models keep their own mode, training or evaluation."""

    def enter_training_mode(self) -> None:
        """Puts a model whose root is in evaluation mode into training mode, with all of its parts."""


@runtime_checkable
class Deferred(Protocol):
    """Extra protocol for backends whose models may have no variables, and so no state, before the first batch."""

    def waits_for_batch(self) -> bool:
        """Returns whether the variables will be created by the next step or evaluation."""


@runtime_checkable
class AveragesState(Protocol):
    """Extra protocol for backends whose models have float state that shards change and the tree averages."""

    def averaged(self) -> list[AveragedArray]:
        """Returns the averaged arrays as they were before the step; called after the step's first shard is computed."""


@runtime_checkable
class KeepsOutputs(Protocol):
    """Extra protocol for backends that give the controller outputs for metric objects, and carried state."""

    outputs: ShardOutputs  # of the last command's shards


class Compiler(Protocol):
    """What compiles the passes of shards."""

    seconds: float  # that this process has spent compiling


@runtime_checkable
class CompilesShards(Protocol):
    """Extra protocol for backends that compile a shard's pass for `wrap(compile=True)`."""

    compiler: Compiler


def read_compile_seconds(backend: Backend) -> float:
    """Returns how long this process has compiled; 0 for a backend that does not say."""
    return backend.compiler.seconds if isinstance(backend, CompilesShards) else 0.0


class Module(Protocol):
    """The functions of a backend's module, which list the framework's devices and open backends on them."""

    joins: bool  # whether processes that a launcher started can train together
    compiles: bool  # whether `wrap(compile=True)` is supported, so that the backend is `CompilesShards`

    def available(self) -> list[str]:
        """Returns the names of this host's accelerators; an empty list if there is only the CPU."""

    def name(self, device: Any) -> str:
        """Returns the name (`cpu:0`) of one of the framework's own device objects."""

    def initial_seed(self) -> int:
        """Returns the seed that the script has given the framework, without drawing from it; 0 if it cannot be read."""

    def variables(self, devices: Sequence[str]) -> Mapping[str, str]:
        """Returns the environment variables that must be set before the framework computes on these devices."""

    def adopt(self, recipe: Recipe) -> Recipe:
        """Returns the trainer's recipe, whose model the script can call and which every step updates."""

    def open(self, recipe: Recipe, devices: Sequence[str]) -> Backend:
        """Creates the backend for the recipe, with one replica on each of `devices`."""

    def processes(self, devices: Sequence[str]) -> list[list[str]]:
        """Returns the devices of each process, the script's own process first."""
