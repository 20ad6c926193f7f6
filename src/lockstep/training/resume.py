"""Takes a snapshot of a `fit` between two steps, and resumes a `fit` from a snapshot."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from lockstep.checkpoint import Snapshot
from lockstep.checkpoint.autosave import Autosave, print_notice, starts_from_beginning
from lockstep.checkpoint.snapshot import Types, check_facts
from lockstep.data.source import Source
from lockstep.errors import ExactError, StateError
from lockstep.training.loop import Loop, LoopPosition
from lockstep.training.session import Session
from lockstep.training.step_logs import Totals

_FACTS: Types = {"place": dict, "epochs": int, "data": dict, "history": dict, "callbacks": list}
_PLACE: Types = {"epoch": int, "batch": int, "sums": np.ndarray, "logs": dict, "seconds": float, "stopped": bool}


def take_fit_snapshot(session: Session, loop: Loop, data_state: Any, logs: Mapping[str, float]) -> Snapshot:
    """Returns a snapshot of the run between two steps, with the state of the data and the `logs` of the last epoch."""
    place = loop.place
    if place.batch:
        place.logs = dict(Totals(session.columns, place.sums))
    facts = {
        "place": asdict(place),
        "epochs": loop.options.epochs,
        "data": {**_data_facts(loop), "state": data_state},
        "history": session.history.state_dict(),
        "callbacks": loop.callbacks.state_dict(),
        "metrics": loop.metrics.state() if place.batch else [],
    }
    return session.snapshot(fit=facts, logs={} if place.batch else dict(logs))


def resume_fit(session: Session, loop: Loop, autosave: Autosave, open_data: Callable[[], Source]) -> Any:
    """Resumes the run from the newest checkpoint and returns the saved states of the callbacks.

    Returns None if there is no checkpoint, or only the one from before the first step.
    """
    newest = session.processes.share(autosave.newest)
    if newest is None:
        return None
    name, saved = newest
    facts: dict[str, Any] = saved.facts.get("fit", {})
    check_facts(facts, _FACTS)
    check_facts(facts["place"], _PLACE)
    if starts_from_beginning(saved, session.run, loop.data.batch_size, session.min_shards):
        return None
    epochs = loop.options.epochs
    place = LoopPosition(**{name: facts["place"][name] for name in _PLACE})
    place.stopped &= epochs <= facts["epochs"]
    over = place.stopped or place.epoch >= epochs
    if session.exact:
        _check_data(_data_facts(loop), facts["data"])
        if not over:
            check_readable_again(loop.data)
    seed = session.run.seed
    session.restore(saved)
    if session.run.seed != seed:
        loop.data = open_data()  # again, because the order of the data depends on the seed of the saved run
    session.history.load_state_dict(facts["history"])
    loop.place, loop.data_state = place, facts["data"].get("state")
    if place.batch and loop.metrics:
        loop.metrics.load_state(facts.get("metrics"), session.exact, session.metric_setting())
    if not over:
        where = f"after {place.batch} steps of" if place.batch else "at the beginning of"
        session.resumed = f"resumed from {name} {where} epoch {place.epoch + 1}"
    elif session.processes.first:
        held = f"already holds {place.epoch} of {epochs} epochs"
        if place.stopped:
            held = f"holds a run that a callback ended after {place.epoch} of {facts['epochs']} epochs"
        elif place.epoch > epochs:
            held = f"already holds {place.epoch} epochs, more than the {epochs} asked for"
        print_notice(f"{autosave.folder} {held}; raise epochs or name another folder")
    return facts["callbacks"]


def check_readable_again(data: Source) -> None:
    """Raises ExactError if the data is a generator, which cannot be read again up to where the saved run stopped."""
    if data.once:
        raise ExactError(
            "This data is a generator, which cannot be read from the batch at which the saved run stopped. Use a "
            "list, a loader, arrays or a lockstep.data pipeline; or exact=False to continue with the generator's next "
            "batches."
        )


def _data_facts(loop: Loop) -> dict[str, Any]:
    data = loop.data
    steps_per_epoch = loop.options.steps_per_epoch
    return {"batch_size": data.batch_size, "examples": data.num_examples, "steps_per_epoch": steps_per_epoch}


def _check_data(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises StateError if the sizes of the data differ from those in the checkpoint."""
    for name, value in here.items():
        if value != saved.get(name):
            raise StateError(
                f"The data differs from that of the saved run: the checkpoint has {name}={saved.get(name)}, and this "
                f"run has {name}={value}. Use {name}={saved.get(name)}, or exact=False to continue with "
                f"{name}={value}."
            )
