"""Models: the forms in which JAX's people have a model, behind one face.

A model is its trained parameters, the other variables it keeps (running
statistics, counters) and a function of both. Inside a shard's executable it is
*bound* to them: something that can be called, and that tells afterwards what the
other variables have become.
"""

from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from lockstep.backends.jax.train_mode import ModuleModes
from lockstep.errors import ModelError

MODULE = nnx.Module
"""A model that holds its own variables."""
OPTIMIZER = nnx.Optimizer
"""An optimizer that was made for such a model."""


class Bound(Protocol):
    """A model with its variables, inside one shard's executable."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The outputs; what the model keeps changes on the way."""

    def others(self) -> Any:
        """The other variables as the calls have left them."""


@runtime_checkable
class Model(Protocol):
    """A model as the backend sees it."""

    donated: bool  # whether nobody else holds the parameters, so that an update may use their memory
    home: str  # under which the parameters stand in a state
    params: Any  # nests of arrays, as the script's own object has them; None before the first batch
    rest: Any
    mode_flags: ModuleModes | None  # the flags that the script turns; None where each call is told its mode

    def bind(self, params: Any, rest: Any, key: Any, training: bool) -> Bound:
        """The model with these variables, inside an executable."""

    def start(self, inputs: Any, key: Any) -> None:
        """Makes the variables from the first batch, where there are none yet."""

    def publish(self, params: Any, rest: Any) -> None:
        """Brings the script's own object up to date."""

    def changed(self) -> bool:
        """Whether the script has put other arrays into its object since they were published."""

    def held(self) -> list[Any]:
        """The arrays in the script's own object."""

    def signature(self) -> Any:
        """What else of the object an executable depends on."""

    def controls(self) -> Any:
        """What of the object travels to other processes beside its arrays."""

    def turn(self, controls: Any) -> None:
        """Takes over what another process's object has there."""


def of(model: Any, wrt: Any = None) -> Model:
    """The model behind whatever the script gave to `wrap`; `wrt` are the variables that an nnx.Optimizer holds."""
    from lockstep.backends.jax.functional_model import Applied, Handle
    from lockstep.backends.jax.nnx_model import Module

    if isinstance(model, Handle):
        return model.applied
    if isinstance(model, nnx.Module):
        return Module(model, nnx.Param if wrt is None else wrt)
    if isinstance(model, nn.Module):
        return Applied.of_module(model)
    if isinstance(model, TrainState):
        return Applied.of_state(model)
    if isinstance(model, tuple) and len(model) == 2 and (callable(model[0]) or isinstance(model[0], nn.Module)):
        return Applied.of_pair(*model)
    if isinstance(model, Model):  # of a framework on top of JAX
        return model
    raise ModelError(
        "A JAX model is a flax.nnx.Module, a flax.linen.Module, a TrainState or (apply, variables). "
        f"Got {type(model).__name__}. Give one of these."
    )
