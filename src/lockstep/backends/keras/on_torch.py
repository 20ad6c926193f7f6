"""Keras on PyTorch: the compiled model as a torch module, with the PyTorch backend's processes, tree and steps.

The module holds the model's own tensors: weights as its parameters, running statistics
as its buffers. So what the PyTorch backend restores, averages, compares and sends is
what the model computes with.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from torch import nn

from lockstep.backends.base import Array, Backend, Node, Recipe, State, Work
from lockstep.backends.change_detector import ChangeDetector
from lockstep.backends.keras import loaders, losses, pickling
from lockstep.backends.keras.compiled import Compiled, Values, parts
from lockstep.backends.keras.optimizer_variables import OptimizerVariables
from lockstep.backends.keras.unsupported import check_built, check_precision, check_scale
from lockstep.backends.torch import rng
from lockstep.backends.torch.backend import TorchBackend
from lockstep.backends.torch.losses import WEIGHING
from lockstep.core.metrics import Column, Metric
from lockstep.core.reduction import Criterion
from lockstep.core.shard_sums import CUSTOM_SUMS
from lockstep.core.state import OPTIMIZER, check_state
from lockstep.core.weighing import Share, Term


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """The PyTorch backend over the model, with the one replica of this process."""
    check_scale(recipe.optimizer)
    (device,) = devices
    return KerasOnTorch(recipe, device)


class Net(nn.Module):
    """A Keras model's own tensors as a torch module's."""

    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        self._compiled = compiled
        self.variables = {name.replace(".", "_"): variable for name, variable in compiled.weights().items()}
        for name, variable in self.variables.items():
            self.register_parameter(name, variable.value)
        for name, variable in compiled.kept().items():
            self._buffers[name.replace(".", "_")] = variable.value  # the tensor itself, so that both see every write

    def values(self) -> Values:
        """What a shard starts from; the generators' seeds come from torch's, which is seeded for each shard."""
        kept = [variable.value.detach().clone() for variable in self._compiled.kept().values()]
        seeds = [torch.randint(1 << 31, (2,)) for _ in self._compiled.generators()]
        states = [seed.to(each.value.dtype) for seed, each in zip(seeds, self._compiled.generators(), strict=True)]
        return Values([variable.value for variable in self._compiled.trained().values()], kept, states)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's outputs; Keras takes several inputs as one nest."""
        given = named or (inputs if len(inputs) > 1 else inputs[0])
        values = self.values()
        outputs, kept = self._compiled.called(values, given, self.training)
        self.keep(values, kept)
        return outputs

    def keep(self, values: Values, kept: Sequence[Any]) -> None:
        """Puts the running statistics that a shard leaves into the module's buffers."""
        with torch.no_grad():
            for variable, before, now in zip(self._compiled.kept().values(), values.kept, kept, strict=True):
                if now is not before:
                    variable.value.copy_(now)


class Stepper(torch.optim.Optimizer):
    """A Keras optimizer behind torch's face."""

    def __init__(self, net: Net, optimizer: Any) -> None:
        super().__init__(net.parameters(), {})
        self._net = net
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        """Keras's own update of those variables that have a gradient."""
        used = [variable for variable in self._net.variables.values() if variable.value.grad is not None]
        with torch.no_grad():
            self._optimizer.apply([variable.value.grad for variable in used], used)


class KerasOnTorch(TorchBackend):
    """One replica of a Keras model."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        check_precision(recipe)
        check_built(recipe.model, "when it is wrapped, on PyTorch")
        compiled = Compiled(recipe.model, recipe.loss)
        if not recipe.optimizer.built:
            recipe.optimizer.build(recipe.model.trainable_variables)
        net = Net(compiled)
        # Under an objective the compiled metrics are not computed: it returns its own.
        held = _places(-(-compiled.room // CUSTOM_SUMS)) if compiled.objective is None else []
        inner = replace(recipe, model=net, optimizer=Stepper(net, recipe.optimizer), metrics=held)
        super().__init__(replace(inner, loss=compiled.objective), device)
        self.versions = {**self.versions, "keras": keras.__version__}
        self._outer = recipe
        self._compiled = compiled
        self._optimizer_variables = OptimizerVariables(compiled, recipe.optimizer)
        self._writes = ChangeDetector(self._read_marks)
        self._prepared = False
        self._shards._kept.way_out = "Make it a weight of the layer: self.add_weight(shape, trainable=False)"
        if compiled.objective is None:
            self._shards._term = self._term

    def computing(self, work: Work) -> AbstractContextManager[None]:
        """As torch's, with the model as the script has it now."""
        self._compiled.look()
        return super().computing(work)

    def _term(self, net: Any, batch: Any, share: Share) -> Term:
        """The loss of one shard, its metrics, and its running statistics in the module's buffers."""
        compiled = self._compiled
        if not self._prepared:
            with rng.borrowed(self._device):  # or the first shard of each process would draw other numbers
                compiled.prepare(batch)
            self._shards._kept.accept()
            self._prepared = True
        values = net.values()
        outcome = compiled.run(values, batch, net.training)
        net.keep(values, outcome.kept)
        with torch.no_grad():
            sums = [torch.as_tensor(each).double().reshape(-1) for each in outcome.sums]
            vector = torch.cat([*sums, torch.empty(0, dtype=torch.float64)])
        share = share._replace(summed=share.summed and parts(batch)[2] is None)
        values = outcome.value, outcome.extra, outcome.counted
        return losses.weigh(WEIGHING, compiled.model, *values, share, outputs=vector, targets=vector)

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics as Keras names them."""
        return super().columns if self._compiled.objective is not None else self._compiled.measures.columns()

    @property
    def criterion(self) -> Criterion | None:
        """The compiled loss, if it does not say how the examples count."""
        found = self._compiled.criterion
        return None if found is None else partial(self._judged, found)

    # -- state

    def state(self) -> State:
        """The module's tensors, and the Keras optimizer's."""
        own = {name: array for name, array in super().state().items() if not name.startswith(OPTIMIZER)}
        return own | self._optimizer_variables.read()

    def load(self, state: Mapping[str, Array]) -> None:
        """Take over a whole state; one that does not fit changes nothing."""
        model = {name: array for name, array in state.items() if not name.startswith(OPTIMIZER)}
        check_state(state, {**self._replica.specs(model), **self._optimizer_variables.specs()})
        super().load(model)
        self._optimizer_variables.write(state)

    def numbers(self) -> list[dict[str, Any]]:
        """The numbers that the optimizer was made with."""
        return self._optimizer_variables.numbers()

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them into the optimizer."""
        self._optimizer_variables.set_numbers(numbers)

    def attributes(self) -> dict[str, Any]:
        """What is frozen; of a layer's own numbers and words many are Keras's, such as its name."""
        return {"trainable": self._compiled.trainable()}

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Writes them into the layers."""
        self._compiled.set_trainable(attributes["trainable"])

    def controls(self) -> Any:
        """Torch's, the Keras optimizer's numbers, and what is frozen: a layer may compute otherwise then."""
        return {**super().controls(), "numbers": self.numbers(), "trainable": self._compiled.trainable()}

    def turn(self, controls: Any) -> None:
        """Takes over the script's."""
        super().turn(controls)
        self.set_numbers(controls["numbers"])
        self._compiled.set_trainable(controls["trainable"])

    def touched(self) -> bool:
        """Whether the script wrote to the model or to the optimizer's variables, which torch's optimizer knows not."""
        own = self._writes.has_changed()  # both are asked, so that both know the present state
        return super().touched() or own

    def update(self, total: Node, work: Work) -> None:
        """As torch's; what the step itself has written counts as seen, where somebody asks."""
        super().update(total, work)
        self._writes.accept()

    def _read_marks(self) -> list[tuple[int, int]]:
        """Torch's counters of writes, and where the variables lie."""
        values = [variable.value for variable in self._optimizer_variables.variables().values()]
        return [(value._version, value.data_ptr()) for value in values]

    def host(self, value: Any) -> Any:
        """A tensor or a Keras variable as numpy."""
        return np.array(value.numpy()) if isinstance(value, keras.Variable) else super().host(value)

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """A source for the data containers that Keras takes, torch's among them."""
        return loaders.of(data, batch_size, shuffle, seed) or super().source(data, batch_size, shuffle, seed)

    def dump(self) -> bytes:
        """The compiled model in one pickle."""
        return pickling.dump(self._outer)


def _places(count: int) -> list[Metric]:
    """Metrics that hold the room of Keras's own: the first has all of their sums, the others none."""
    return [
        Metric(sums=_all if index == 0 else _none, result=lambda sums: 0.0, name=f"keras {index}")
        for index in range(count)
    ]


def _all(outputs: Any, targets: Any) -> Any:
    return outputs


def _none(outputs: Any, targets: Any) -> Any:
    return outputs[:0]
