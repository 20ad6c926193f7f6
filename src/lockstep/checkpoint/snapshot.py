"""A run as a snapshot, which is named arrays and a few facts, and back.

What does not fit is refused before anything is changed, with both values.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import NoneType
from typing import Any

import numpy as np

from lockstep.backends.base import Array, Attributed, Backend, Recipe
from lockstep.checkpoint.format import Snapshot
from lockstep.core import arguments, hyperparameters
from lockstep.core.state import check_versions
from lockstep.errors import CheckpointError, ExactError, StateError
from lockstep.training.run_state import Run

BITS = 2  # raised whenever Lockstep itself comes to other bits from the same run

Types = Mapping[str, type | tuple[type, ...]]  # of the facts of a manifest
_FACTS: Types = {
    "step": int,
    "epoch": int,
    "seed": int,
    "shards": (int, NoneType),
    "threads": (int, NoneType),
    "framework": str,
    "device": str,
    "versions": dict,
    "exact": bool,
    "options": dict,
    "optimizer": str,
    "numbers": list,
}


def take_snapshot(recipe: Recipe, backend: Backend, run: Run, **more: Any) -> Snapshot:
    """Return a copy of everything that the rest of the run follows from; `more` is added to the facts."""
    facts = {
        **run.state(),
        "framework": backend.name,
        "device": _kind(backend),
        "versions": {**backend.versions, "bits": BITS},
        "exact": recipe.options.exact,
        "options": _options(recipe),
        "optimizer": _class(recipe.optimizer),
        "numbers": backend.numbers(),
    }
    if isinstance(backend, Attributed):
        facts["attributes"] = backend.attributes()
    return Snapshot(backend.state(), {**facts, **more})


def restore_snapshot(saved: Snapshot, recipe: Recipe, backend: Backend, run: Run, num_devices: int) -> None:
    """Take over a snapshot, if it fits."""
    facts, exact = saved.facts, recipe.options.exact
    check_facts(facts, _FACTS)
    saved_run = Run.from_saved(facts)
    _check_fit(facts, recipe, backend)
    if exact:
        _check_exact(facts, recipe, backend)
    run.check(saved_run, exact, num_devices)
    hyperparameters.check_groups(facts["numbers"], backend.numbers(), recipe.habits.open_groups)
    with _attributes(facts, backend):
        backend.load(saved.state)
    backend.set_numbers(facts["numbers"])
    run.take_over(saved_run if backend.criterion is not None else replace(saved_run, reduction=None))


def check_state(state: Any) -> None:
    """Raise `StateError` for what is no state at all; the backend checks whether it fits the model."""
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(array, Array) and isinstance(array.data, np.ndarray)
        for name, array in state.items()
    ):
        raise StateError(
            f"A state is a dict of arrays as trainer.state() gives them. Got {arguments.show(state)}. "
            "Change what trainer.state() gave, or use trainer.restore(path)."
        )


@contextmanager
def _attributes(facts: Mapping[str, Any], backend: Backend) -> Iterator[None]:
    """Inside, the model has the attributes of the checkpoint, and keeps them unless the state is then refused."""
    if "attributes" not in facts or not isinstance(backend, Attributed):
        yield
        return
    check_facts(facts, {"attributes": dict})
    before = backend.attributes()
    _check_attributes(facts["attributes"], before, "")
    backend.set_attributes(facts["attributes"])
    try:
        yield
    except BaseException:
        backend.set_attributes(before)
        raise


def _check_attributes(saved: Mapping[str, Any], own: Mapping[str, Any], at: str) -> None:
    """Refuse values of another kind than the model's own; the backend judges those that only one of the two has."""
    for name, there in own.items():
        value = saved.get(name, {} if at else None)
        if isinstance(there, dict) and isinstance(value, dict):
            _check_attributes(value, there, f"{at}{name}.")
        elif name in saved or not at:
            free = (
                value is None or there is None or (isinstance(there, list | tuple) and isinstance(value, list | tuple))
            )
            if isinstance(there, dict) or not (free or hyperparameters.is_same_kind(value, there)):
                raise StateError(
                    f"The checkpoint does not fit this model. It has {at}{name}={value!r:.100}, the model "
                    f"{there!r:.100}. Use the model it was saved with."
                )


def check_facts(facts: Mapping[str, Any], types: Types) -> None:
    """Raise if a manifest lacks a fact or has it in another form: then Lockstep has not written it."""
    for name, wanted in types.items():
        value = facts.get(name)
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise CheckpointError(
                f"A manifest holds {name!r} as Lockstep writes it. Got {value!r:.100}. Use another checkpoint."
            )


def _check_fit(facts: Mapping[str, Any], recipe: Recipe, backend: Backend) -> None:
    if facts["framework"] != backend.name:
        raise StateError(
            f"A checkpoint belongs to one framework. This one is {facts['framework']}'s, the model {backend.name}'s. "
            "Read its arrays with lockstep.load_arrays."
        )
    optimizer = _class(recipe.optimizer)
    if facts["optimizer"] != optimizer:
        raise StateError(
            f"The checkpoint does not fit this optimizer. It was saved with {facts['optimizer']}, this run has "
            f"{optimizer}. Use the optimizer it was saved with."
        )
    there, here = len(facts["numbers"]), len(backend.numbers())
    if there != here:
        raise StateError(
            f"The checkpoint does not fit this optimizer. It has {there} groups of parameters, the optimizer {here}. "
            "Give the optimizer the same groups."
        )


def _check_exact(facts: Mapping[str, Any], recipe: Recipe, backend: Backend) -> None:
    """Refuse what the promise of equal bits does not allow, although the state fits."""
    if not facts["exact"]:
        raise ExactError(
            "An exact run goes on from an exact one. This checkpoint was saved with exact=False. Use exact=False."
        )
    for name, value in _options(recipe).items():
        saved = facts["options"].get(name)
        if saved != value:
            raise ExactError(
                f"How a step is computed is part of the bits. The checkpoint has {name}={saved!r}, "
                f"this run {name}={value!r}. Use the same, or exact=False to go on without the promise."
            )
    there = {**facts["versions"], "device": facts["device"]}
    here = {**backend.versions, "bits": BITS, "device": _kind(backend)}
    check_versions(there, here)


def _kind(backend: Backend) -> str:
    return backend.devices[0].partition(":")[0]


def _options(recipe: Recipe) -> dict[str, Any]:
    return {"precision": recipe.options.precision, "clip_norm": recipe.options.clip_norm}


def _class(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
