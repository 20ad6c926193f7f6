"""Takes a snapshot of a run, and restores a run from a snapshot.

A snapshot is arrays by name, and `facts`: plain values such as the step, the seed and the hyperparameters.

If a snapshot does not fit the run, an error that shows both values is raised before anything is changed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import NoneType
from typing import Any

import numpy as np

from lockstep.backends.base import Attributed, Backend, Recipe
from lockstep.checkpoint.format import Snapshot
from lockstep.core import arguments, hyperparameters
from lockstep.core.options import Options
from lockstep.core.run_state import Run
from lockstep.core.state import check_versions
from lockstep.core.types import Array
from lockstep.errors import CheckpointError, ExactError, StateError

BITS = 2  # increased with every change of Lockstep that changes the bits of a run

Types = Mapping[str, type | tuple[type, ...]]  # the types of the facts in a manifest, by name
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
    """Returns a copy of the complete state of a run, from which it can be resumed; `more` is added to the facts."""
    facts = {
        **run.state(),
        "framework": backend.name,
        "device": _kind(backend),
        "versions": {**backend.versions, "bits": BITS},
        "exact": recipe.options.exact,
        "options": _options(recipe.options),
        "optimizer": _class(recipe.optimizer),
        "numbers": backend.numbers(),
    }
    if isinstance(backend, Attributed):
        facts["attributes"] = backend.attributes()
    return Snapshot(backend.state(), {**facts, **more})


def restore_snapshot(saved: Snapshot, recipe: Recipe, backend: Backend, run: Run, num_devices: int) -> None:
    """Loads a snapshot into the backend and the run; if it does not fit, raises before anything is changed."""
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
    """Raises `StateError` if `state` is not a dict of arrays; the backend checks whether they fit the model."""
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(array, Array) and isinstance(array.data, np.ndarray)
        for name, array in state.items()
    ):
        raise StateError(
            f"A state must be a dict of arrays, as trainer.state() returns. Got {arguments.show(state)}. Give a dict "
            "that trainer.state() has returned, or use trainer.restore(path)."
        )


@contextmanager
def _attributes(facts: Mapping[str, Any], backend: Backend) -> Iterator[None]:
    """Sets the model's attributes to those in the checkpoint; sets the old values again if the block raises."""
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
    """Raises StateError if a saved attribute has another kind of value than the model's attribute of this name.

    Names that only the checkpoint or only the model has are checked by the backend.
    """
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
                    f"The checkpoint does not fit this model: {at}{name} is {value!r:.100} in the checkpoint and "
                    f"{there!r:.100} in the model. Use the model with which the checkpoint was saved."
                )


def check_facts(facts: Mapping[str, Any], types: Types) -> None:
    """Raises CheckpointError if one of the plain values in a manifest is missing or has a wrong type."""
    for name, wanted in types.items():
        value = facts.get(name)
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise CheckpointError(
                "The checkpoint cannot be read, because its manifest is damaged or was not written by Lockstep: it has "
                f"{name}={value!r:.100}. Use another checkpoint."
            )


def _check_fit(facts: Mapping[str, Any], recipe: Recipe, backend: Backend) -> None:
    if facts["framework"] != backend.name:
        raise StateError(
            f"This checkpoint was saved with {facts['framework']}, and the model is a {backend.name} model. Use a "
            f"{facts['framework']} model, or read the arrays with lockstep.load_arrays."
        )
    optimizer = _class(recipe.optimizer)
    if facts["optimizer"] != optimizer:
        raise StateError(
            f"The checkpoint does not fit this optimizer. The checkpoint was saved with {facts['optimizer']}, and this "
            f"run has {optimizer}. Use the optimizer with which the checkpoint was saved."
        )
    there, here = len(facts["numbers"]), len(backend.numbers())
    if there != here:
        raise StateError(
            f"The checkpoint does not fit this optimizer. The checkpoint has {there} groups of parameters, and the "
            f"optimizer has {here}. Give the optimizer the same groups."
        )


def _check_exact(facts: Mapping[str, Any], recipe: Recipe, backend: Backend) -> None:
    """Raises ExactError if the resumed run would not give the same bits as the saved run would have given."""
    if not facts["exact"]:
        raise ExactError(
            "This checkpoint was saved with exact=False, so a run with exact=True cannot be resumed from it. Use "
            "exact=False."
        )
    for name, value in _options(recipe.options).items():
        saved = facts["options"].get(name, _options(Options())[name])  # an older version of Lockstep did not have it
        if saved != value:
            raise ExactError(
                f"The checkpoint was saved with {name}={saved!r}, and this run has {name}={value!r}, so it would "
                f"not give the same bits as the saved run. Use {name}={saved!r}, or exact=False to continue without "
                "bit-identical results."
            )
    there = {**facts["versions"], "device": facts["device"]}
    here = {**backend.versions, "bits": BITS, "device": _kind(backend)}
    check_versions(there, here)


def _kind(backend: Backend) -> str:
    return backend.devices[0].partition(":")[0]


def _options(options: Options) -> dict[str, Any]:
    return {"precision": options.precision, "clip_norm": options.clip_norm, "compile": options.compile}


def _class(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
