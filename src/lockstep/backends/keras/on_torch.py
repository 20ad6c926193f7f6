"""Keras on PyTorch: a compiled model as a torch module and a torch optimizer for the PyTorch backend.

The module's parameters are the tensors of the model's weights, and its buffers are the tensors of the running
statistics. So the PyTorch backend restores, averages, compares and sends the tensors with which the model computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from torch import nn

from lockstep.backends import keras_optimizer_state
from lockstep.backends.base import Backend, Recipe
from lockstep.backends.change_detector import ChangeDetector
from lockstep.backends.keras import loaders, losses, pickling
from lockstep.backends.keras.optimizer_variables import OptimizerVariables
from lockstep.backends.keras.stateless_model import CompiledModel, VariableValues, split_batch
from lockstep.backends.keras.unsupported import check_built, check_loss_scale, check_precision
from lockstep.backends.torch.backend import TorchBackend
from lockstep.backends.torch.losses import WEIGHING
from lockstep.backends.torch.shard_program import ShardProgram
from lockstep.core.loss_reduction import Criterion
from lockstep.core.metrics import Column, Sums
from lockstep.core.shard_sums import Summand, list_loss_parts
from lockstep.core.state import OPTIMIZER, check_state
from lockstep.core.types import Array, PartialSum, Work
from lockstep.core.weighing import Share, Term


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """Returns the backend that trains a Keras model on PyTorch, with the one replica of this process."""
    check_loss_scale(recipe.optimizer)
    (device,) = devices
    return KerasOnTorch(recipe, device)


class KerasTorchModule(nn.Module):
    """A torch module whose parameters and buffers are the tensors of a Keras model."""

    def __init__(self, compiled: CompiledModel) -> None:
        super().__init__()
        self._compiled = compiled
        self.variables = {name.replace(".", "_"): variable for name, variable in compiled.weights.items()}
        for name, variable in self.variables.items():
            self.register_parameter(name, variable.value)
        for name, variable in compiled.statistics.items():
            # The variable's own tensor and no copy: the model reads what the backend writes, and the other way round.
            self._buffers[name.replace(".", "_")] = variable.value

    def read_values(self) -> VariableValues:
        """Returns the variables' values at the start of a shard.

        Seed variables are drawn from torch's generator, which is reseeded for each shard.
        """
        statistics = [variable.value.detach().clone() for variable in self._compiled.statistics.values()]
        seeds = [torch.randint(1 << 31, (2,)) for _ in self._compiled.generators]
        states = [seed.to(each.value.dtype) for seed, each in zip(seeds, self._compiled.generators, strict=True)]
        return VariableValues([variable.value for variable in self._compiled.trainable.values()], statistics, states)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Computes the model's outputs; Keras takes several inputs as one tuple or dict."""
        given = named or (inputs if len(inputs) > 1 else inputs[0])
        values = self.read_values()
        outputs, statistics = self._compiled.call_with(values, given, self.training)
        self.write_statistics(values, statistics)
        return outputs

    def write_statistics(self, before: VariableValues, after: Sequence[Any]) -> None:
        """Writes the running statistics that a shard has changed into the module's buffers."""
        with torch.no_grad():
            for variable, old, new in zip(self._compiled.statistics.values(), before.statistics, after, strict=True):
                if new is not old:
                    variable.value.copy_(new)


class KerasTorchOptimizer(torch.optim.Optimizer):
    """A Keras optimizer with the interface of a torch optimizer."""

    def __init__(self, module: KerasTorchModule, optimizer: Any) -> None:
        super().__init__(module.parameters(), {})
        self._module = module
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        """Makes Keras's update of the variables that have a gradient."""
        used = [variable for variable in self._module.variables.values() if variable.value.grad is not None]
        with torch.no_grad():
            self._optimizer.apply([variable.value.grad for variable in used], used)


class KerasTorchProgram(ShardProgram):
    """The loss and the metrics with which a Keras model was compiled."""

    attribute_advice = "Make it a weight of the layer: self.add_weight(shape, trainable=False)"
    is_prepared = False

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = compiled
        self.compute = self._compute
        self.metrics = ()
        self.room = compiled.room
        self.reads_model_loss = False

    def prepare(self, batch: Any) -> None:
        """Creates the variables of the compiled metrics."""
        self._compiled.prepare(batch)
        self.is_prepared = True

    def _compute(self, model: Any, batch: Any, share: Share) -> Term:
        """Computes the loss and the metrics of one shard; writes its running statistics into the module's buffers."""
        values = model.read_values()
        result = self._compiled.compute(values, batch, model.training)
        model.write_statistics(values, result.statistics)
        share = share._replace(summed=share.summed and split_batch(batch)[2] is None)
        loss = result.loss, result.extra_loss, result.counted
        return losses.weigh(WEIGHING, self._compiled.model, *loss, share, outputs=result.sums)

    def measure(self, term: Term, examples: int) -> tuple[list[Summand], list[Column]]:
        """Returns the loss and the variables of the metrics, which are sums."""
        sums = [Summand(torch.as_tensor(each, dtype=torch.float64)) for each in term.outputs]
        return [*list_loss_parts(term), *sums], self._compiled.metrics.list_columns()


class KerasOnTorch(TorchBackend):
    """One replica of a Keras model."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        check_precision(recipe)
        check_built(recipe.model, "Keras on PyTorch")
        compiled = CompiledModel(recipe.model, recipe.loss)
        if not recipe.optimizer.built:
            recipe.optimizer.build(recipe.model.trainable_variables)
        module = KerasTorchModule(compiled)
        optimizer = KerasTorchOptimizer(module, recipe.optimizer)
        inner = replace(recipe, model=module, optimizer=optimizer, loss=compiled.objective, metrics=())
        # An objective returns its own metrics, and the compiled metrics are not computed.
        super().__init__(inner, device, KerasTorchProgram(compiled) if compiled.objective is None else None)
        self.versions = {**self.versions, "keras": keras.__version__}
        self._keras_recipe = recipe
        self._compiled = compiled
        self._optimizer_variables = OptimizerVariables(compiled, recipe.optimizer)
        self._writes = ChangeDetector(self._read_versions)  # of the script, into the optimizer's variables

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """Finds which variables are trainable now, then opens the PyTorch backend's context."""
        self._compiled.refresh()
        with super().computing(work):
            yield

    @property
    def criterion(self) -> Criterion | None:
        """The compiled loss as a function of (outputs, targets); None if its reduction is known."""
        criterion = self._compiled.criterion
        return None if criterion is None else partial(self._compute_criterion, criterion)

    # -- state

    def state_tensors(self) -> dict[str, Any]:
        """Returns the module's tensors, and a copy of the Keras optimizer's variables."""
        # The torch optimizer has no state of its own: it calls Keras's.
        model = {name: tensor for name, tensor in super().state_tensors().items() if not name.startswith(OPTIMIZER)}
        return model | self._optimizer_variables.read()

    def load(self, state: Mapping[str, Array]) -> None:
        """Writes a state into model and optimizer; raises StateError, and writes nothing, if the state does not fit."""
        model = {name: array for name, array in state.items() if not name.startswith(OPTIMIZER)}
        check_state(state, {**self._replica.specs(model), **self._optimizer_variables.read_specs()})
        super().load(model)
        self._optimizer_variables.write(state)

    def numbers(self) -> list[dict[str, Any]]:
        """Returns the optimizer's hyperparameters as a list of one group."""
        return keras_optimizer_state.read_hyperparameters(self._keras_recipe.optimizer)

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Sets the hyperparameters; with a learning-rate schedule, `lr` must be the schedule's present value."""
        keras_optimizer_state.write_hyperparameters(self._keras_recipe.optimizer, numbers)

    def attributes(self) -> dict[str, Any]:
        """Returns which layers and variables are trainable, but no other attributes, many of which belong to Keras."""
        return {"trainable": self._compiled.read_trainable_flags()}

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Freezes and unfreezes layers and variables as `attributes` says."""
        self._compiled.write_trainable_flags(attributes["trainable"])

    def controls(self) -> Any:
        """Returns PyTorch's controls, the hyperparameters, and which layers and variables are trainable."""
        return {**super().controls(), "numbers": self.numbers(), **self.attributes()}

    def turn(self, controls: Any) -> None:
        """Applies the settings that `controls` has returned in the script's process."""
        super().turn(controls)
        self.set_numbers(controls["numbers"])
        self.set_attributes(controls)

    def touched(self) -> bool:
        """Returns whether the script wrote to the model or to the Keras optimizer's variables."""
        has_changed = self._writes.has_changed()  # before `or`, because both detectors must read the current state
        return super().touched() or has_changed

    def update(self, total: PartialSum, sums: Sums, work: Work) -> None:
        """Makes the optimizer's step, whose own writes do not count as writes of the script."""
        super().update(total, sums, work)
        self._writes.accept()

    def _read_versions(self) -> list[tuple[int, int]]:
        """Returns the write counter and the address of each optimizer variable."""
        values = [variable.value for variable in self._optimizer_variables.name_variables().values()]
        return [(value._version, value.data_ptr()) for value in values]

    def host(self, value: Any) -> Any:
        """Returns a tensor or a Keras variable as numpy, and any other value as it is."""
        return np.array(value.numpy()) if isinstance(value, keras.Variable) else super().host(value)

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """Returns a source that reads a dataset of Keras, TensorFlow or PyTorch; None for any other data."""
        return loaders.make_source(data, batch_size, shuffle, seed) or super().source(data, batch_size, shuffle, seed)

    def dump(self) -> bytes:
        """Returns a pickle of the recipe with the Keras model, for a worker."""
        return pickling.dump(self._keras_recipe)
