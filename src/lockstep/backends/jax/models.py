"""One interface for the kinds of models that JAX has: flax.nnx, flax.linen, TrainState, (apply, variables).

A model has trained parameters (`params`), untrained variables such as running statistics and counters (`rest`), and a
function of both. Inside a shard's executable the function is *bound* to the variables: a callable that afterwards
returns the new `rest`.
"""

from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from lockstep.backends.jax.train_mode import ModuleModes
from lockstep.errors import ModelError

NNX_MODULE = nnx.Module
"""The class of models that contain their own variables."""
NNX_OPTIMIZER = nnx.Optimizer
"""The class of optimizers that contain their own state, for an nnx module."""


class BoundModel(Protocol):
    """A model with its variables, inside a shard's executable."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Returns the outputs; stores what the call writes to untrained variables, e.g. running statistics."""

    def read_rest(self) -> Any:
        """Returns the untrained variables after all calls so far."""


@runtime_checkable
class Model(Protocol):
    """The interface through which the JAX backend uses a model."""

    may_donate: bool  # whether an update may reuse the arrays' memory, because the script has no reference to them
    params_prefix: str  # the prefix of the parameters' names in a state
    params: Any  # a pytree of arrays; None before the first batch
    rest: Any  # a pytree with the arrays of the untrained variables
    mode_flags: ModuleModes | None  # the module's own mode flags; None if the mode is an argument of each call

    def bind(self, params: Any, rest: Any, key: Any, training: bool) -> BoundModel:
        """Returns the model with these variables, inside an executable."""

    def create_variables(self, inputs: Any, key: Any) -> None:
        """Creates missing variables from the inputs of the first batch."""

    def publish(self, params: Any, rest: Any) -> None:
        """Writes the arrays into the script's object."""

    def read_changes(self) -> bool:
        """Reads the arrays that the script has replaced since `publish`; returns whether it has replaced any."""

    def list_arrays(self) -> list[Any]:
        """Returns the arrays in the script's object; empty if the script only has copies."""

    def read_trace_key(self) -> Any:
        """Returns what an executable depends on besides the arrays; if it changes, the model is compiled again."""

    def read_attributes(self) -> Any:
        """Returns what other processes need besides the arrays: an nnx module's scalars and strings, or None."""

    def write_attributes(self, attributes: Any) -> None:
        """Applies the values that `read_attributes` has returned in another process."""


def adapt_model(model: Any, wrt: Any = None) -> Model:
    """Adapts the model that the script gave to `wrap`; `wrt` selects the variables that an nnx.Optimizer trains."""
    from lockstep.backends.jax.functional_model import FunctionalModel, ModelHandle
    from lockstep.backends.jax.nnx_model import NnxModel

    if isinstance(model, ModelHandle):
        return model.functional_model
    if isinstance(model, nnx.Module):
        return NnxModel(model, nnx.Param if wrt is None else wrt)
    if isinstance(model, nn.Module):
        return FunctionalModel.from_module(model)
    if isinstance(model, TrainState):
        return FunctionalModel.from_train_state(model)
    if isinstance(model, tuple) and len(model) == 2 and (callable(model[0]) or isinstance(model[0], nn.Module)):
        return FunctionalModel.from_pair(*model)
    if isinstance(model, Model):  # of a framework on top of JAX, such as Keras
        return model
    raise ModelError(
        f"{type(model).__name__} is not a JAX model. Use a flax.nnx.Module, a flax.linen.Module, a TrainState or "
        "(apply, variables)."
    )
