"""The beginning: the checkpoint that a run has before its first step.

Without it, a run that fails before its first checkpoint leaves a trained model in the trainer and nothing to go back
to: `fit` again would begin with the weights of the failed run.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.backends.base import Deferred
from lockstep.checkpoint import Snapshot
from lockstep.core import batches
from lockstep.run import Run
from lockstep.saver import Saver

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

_DECIDED = ("shards", "threads")  # by the first batch, where they were not given


class Beginning:
    """The state before the first epoch, to be saved when the first batch has decided the shards.

    A resumed run keeps its shards, so they must be in the checkpoint; and they may follow from the number of devices.
    A model that has no variables before its first batch is evaluated on that once, which makes them.
    """

    def __init__(self, trainer: "Trainer[Any]", saver: Saver, take: Callable[[], Snapshot]) -> None:
        self._trainer = trainer
        self._saver = saver
        self._take = take
        backend = trainer._backend
        self._waits = isinstance(backend, Deferred) and backend.waits_for_batch()
        self._snapshot = None if self._waits else self._taken()

    def save(self, batch: Any) -> None:
        """Saves it, with the numbers that follow from the first batch."""
        trainer, run = self._trainer, self._trainer._run
        trainer._decide(batches.count(batch))
        if self._waits:
            works, _ = trainer._works(batch, run.step, trainer._num_shards(1))
            trainer._team.gather("evaluate", works)
            self._snapshot = self._taken()
        if self._snapshot is not None:
            snapshot, decided = self._snapshot, {name: getattr(run, name) for name in _DECIDED}
            self._saver.save(run.step, lambda: replace(snapshot, facts={**snapshot.facts, **decided}))

    def _taken(self) -> Snapshot | None:
        """The state of now, in the process that writes."""
        return self._take().sealed() if self._saver.writes else None


def starts_anew(trainer: "Trainer[Any]", saved: Snapshot, data: Mapping[str, Any]) -> bool:
    """Whether nothing was trained since the saved beginning, neither there nor in this trainer.

    Then the script's own weights, rates and data count, which may have been changed after an early failure. Only the
    shards and threads that followed from the batch and the host are the saved ones, so that the run made again
    elsewhere gives the same bits.
    """
    facts = saved.facts
    place = facts["fit"]["place"]
    if (place["epoch"], place["batch"]) != (0, 0) or facts.get("step") != trainer.num_steps:
        return False
    run, there = trainer._run, Run.from_saved(facts)
    same = facts["fit"]["data"].get("batch_size") == data["batch_size"]
    if same and run.shards is None and there.shards is not None and there.shards >= len(trainer.devices):
        run.take_over(replace(run, shards=there.shards, threads=there.threads))
    return True
