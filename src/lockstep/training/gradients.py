"""Computes the gradient of one batch by parameter, and makes an update with a gradient that the script has changed."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.core import batches, host_vectors
from lockstep.core.arguments import show
from lockstep.core.layout import Field, Layout
from lockstep.core.metrics import DIVIDED
from lockstep.core.types import GivenGradient, Phases
from lockstep.errors import AttemptAborted, BatchError, ModelError
from lockstep.training.session import Session
from lockstep.training.step_logs import StepLogs, collect_logs


class Gradients(dict[str, Any]):
    """The gradient of one batch: an array of the framework for each parameter, by its name in the model.

    `logs` are the loss and the metrics of the batch. The values may be replaced; `trainer.apply` uses them as they are,
    and writes the running statistics that the model had computed for this batch.
    """

    def __init__(self, values: Mapping[str, Any], logs: StepLogs, given: GivenGradient, num_examples: int) -> None:
        super().__init__(values)
        self.logs = logs
        self.given = given
        self.num_examples = num_examples


def compute_gradients(session: Session, batch: Any, shown: int) -> Gradients:
    """Returns the gradient of one batch and its logs, computed as in a step that ends before its update."""
    if session.recipe.options.precision == "fp16":
        raise ModelError(
            "The gradients of precision='fp16' have a loss scale, so they cannot be read or replaced. Use "
            "precision='bf16', which needs no scale, or trainer.step(batch)."
        )
    outcome = session.step(batch, Phases.GRADIENT)
    backend = session.backend
    layout = backend.layout()
    assert outcome.total is not None
    total = backend.add(outcome.total, None, backend.create_buffer(layout, memoryview(bytearray(layout.nbytes))))
    vectors = {dtype: np.array(backend.host(vector)) for dtype, vector in total.items()}
    sums = outcome.sums.copy()
    sums[DIVIDED] = 0.0  # the division is done
    values = {field.name: backend.native(host_vectors.view(vectors, field).copy()) for field in _list_gradients(layout)}
    logs = collect_logs(session, outcome, shown)
    return Gradients(values, logs, GivenGradient(vectors, sums), batches.count(batch))


def apply_gradients(session: Session, gradients: Any) -> None:
    """Makes the optimizer's step with these gradients on every replica."""
    if not isinstance(gradients, Gradients):
        raise BatchError(
            f"trainer.apply takes what trainer.gradients(batch) has returned. Got {show(gradients)}. Change its "
            "values: gradients = trainer.gradients(batch); gradients[name] = ...; trainer.apply(gradients)."
        )
    backend, given = session.backend, gradients.given
    fields = {field.name: field for field in _list_gradients(backend.layout())}
    if fields.keys() != gradients.keys():
        other = sorted(fields.keys() ^ gradients.keys())
        raise BatchError(
            "trainer.apply needs one array for each parameter that is trained, and no other. Only the gradients or "
            f"only the trained parameters contain {', '.join(other)}. Give zeros for a parameter that is not to "
            "change, and compute gradients again after freezing layers."
        )
    vectors = {dtype: np.array(vector) for dtype, vector in given.vectors.items()}
    for name, field in fields.items():
        host_vectors.view(vectors, field)[...] = _read_array(backend.host(gradients[name]), field)
    _update(session, GivenGradient(vectors, given.sums), gradients.num_examples)


def _update(session: Session, given: GivenGradient, num_examples: int) -> None:
    """Makes a step in which the given gradient takes the place of the first shard, and all other shards are empty."""
    session.free_last_gradient()

    while True:
        processes = session.processes
        work = replace(session.plan_nothing(), num_examples=num_examples, phases=Phases.UPDATE)
        plan = processes.assign(work.num_shards)
        works = [
            replace(work, pieces={each: {0: given} if each == plan.owners[0] else {} for each in replicas})
            for replicas in processes.replicas()
        ]
        with suppress(AttemptAborted), processes.step(works, plan) as own:  # else the others make it again
            processes.member.step(own, plan, session.count_step)
            return


def _read_array(value: Any, field: Field) -> Any:
    array = np.asarray(value)
    if not np.can_cast(array.dtype, field.dtype, "same_kind"):
        raise BatchError(
            f"The gradient of {field.name} must be real numbers of type {field.dtype}. Got {array.dtype}. Convert it, "
            "for example to its real part."
        )
    if array.shape != field.shape:
        raise BatchError(
            f"The gradient of {field.name} must have the shape {field.shape}. Got {array.shape}. Give an array of the "
            "parameter's own shape."
        )
    return array


def _list_gradients(layout: Layout) -> list[Field]:
    """Returns the fields of the gradients, without those of averaged arrays."""
    return [field for field in layout.fields if field.offset < layout.divided.get(field.dtype, 0)]
