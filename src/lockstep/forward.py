"""Forward: passes over data that change nothing, for `evaluate` and `predict`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.core import batches, loop, plan, tree
from lockstep.core.metric_objects import MetricPass, Setting
from lockstep.core.reduction import Reduction
from lockstep.data.source import Source
from lockstep.errors import BatchError

if TYPE_CHECKING:
    from lockstep.trainer import Trainer


def source(
    trainer: "Trainer[Any]", data: Any, batch_size: int | None, default: int | None = None, steps: int | None = None
) -> Source:
    """The data in its own order, once through; without a size in batches of `default`, or of the last training's."""
    read = trainer._source(data, batch_size, shuffle=False, default=default)
    if read.endless and steps is None:
        raise BatchError(
            "Data to evaluate or predict has an end. Got endless data. Give steps=100, say (validation_steps= in fit), "
            "or leave out .repeat()."
        )
    return read


def inputs(trainer: "Trainer[Any]", data: Any) -> Any:
    """What `predict` was given, with several inputs in a tuple; raises where a list may as well be several batches."""
    if not batches.is_list_of_arrays(data):
        return data
    if len(data) == 1:
        return data[0]
    if not trainer._recipe.habits.lists:
        raise BatchError(
            "Several inputs are a tuple, several batches come from an iterator; a list of arrays may be either. "
            f"Got {batches.describe(tuple(data))} in a list. Use predict((x1, x2)), or predict(iter([x1, x2]))."
        )
    return tuple(data)


def _plainly(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    return begin()


def evaluate(
    trainer: "Trainer[Any]",
    data: Source,
    over: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]] = _plainly,
    steps: int | None = None,
) -> dict[str, float]:
    """Loss and metrics over the first `steps` batches, or all, every example counted once; `over` reads the batches."""
    metrics = trainer._metric_objects.start()
    totals = loop.Totals(lambda: list(trainer._backend.columns), others=metrics.values)
    for num_shards, _, shards in _gather(trainer, "evaluate", over(lambda: islice(data.epoch(0), steps))):
        update(trainer, metrics, num_shards)
        sums = tree.fold([shards.get(shard) for shard in range(num_shards)], np.add)
        assert sums is not None
        totals.add(sums)
    return dict(totals)


def read_reduction(trainer: "Trainer[Any]", batch: Any) -> Reduction | None:
    """How the loss is taken: as the run knows it, else as this batch tells; None if the loss itself says so.

    It is found out by the process that has the first shard, whatever the number of devices, and shared with the others.
    """
    run, team = trainer._run, trainer._team
    if run.reduction is not None or trainer._backend.criterion is None:
        return run.reduction
    num_shards = trainer._num_shards(batches.count(batch))
    works, _ = trainer._works(batch, run.step, num_shards)
    first, *others = works[0].pieces

    def read() -> Reduction | None:
        for piece in batches.cut(batch, num_shards):
            if piece is not None:
                pieces = {first: {0: piece}, **{replica: {} for replica in others}}
                found = team.member.read_reduction(replace(works[0], pieces=pieces))
                if found is not None:  # a shard whose loss is 0 tells nothing
                    return found
        return None

    found: Reduction | None = team.share(read)
    return found


def update(trainer: "Trainer[Any]", metrics: MetricPass, num_shards: int | None = None) -> None:
    """Brings the batch that was just computed to the metric objects, where there are any."""
    if metrics:
        metrics.update(*outputs(trainer, num_shards))


def outputs(trainer: "Trainer[Any]", num_shards: int | None = None) -> tuple[dict[int, Any], Setting]:
    """The outputs and targets of that batch by shard, and the setting for what is computed of them."""
    return trainer._everyone("outputs"), setting(trainer, num_shards)


def setting(trainer: "Trainer[Any]", num_shards: int | None = None) -> Setting:
    """Gives a context with the threads and switches under which a batch is computed."""
    works, _ = trainer._works(np.zeros(1), trainer._run.step, num_shards or trainer._num_shards(1))
    return lambda: trainer._backend.computing(works[0])


def rows(trainer: "Trainer[Any]", inputs: Iterator[Any]) -> Any:
    """The outputs for every batch of inputs, put end to end."""
    found = []
    for num_shards, num_examples, shards in _gather(trainer, "forward", inputs):
        sizes = plan.sizes(num_examples, num_shards)
        for shard in sorted(shards):
            batches.check_rows(shards[shard], sizes[shard])
            found.append(shards[shard])
    return batches.join(found, np.concatenate)


def _gather(trainer: "Trainer[Any]", method: str, read: Iterator[Any]) -> Iterator[tuple[int, int, dict[int, Any]]]:
    """For every batch the numbers of shards and examples, and every shard's result; the first batch decides."""
    num_shards = reduction = None
    for index, batch in enumerate(read):
        num_examples = batches.count(batch)
        num_shards = num_shards or trainer._num_shards(num_examples)
        if method == "evaluate" and reduction is None:  # for this evaluation alone: it is the first step that decides
            reduction = read_reduction(trainer, batch)
        works, _ = trainer._works(batch, index, num_shards, reduction)
        parts = trainer._team.gather(method, works)
        yield num_shards, num_examples, {shard: value for part in parts for shard, value in part.items()}
    if num_shards is None:
        raise BatchError("Data holds at least one batch. Got none. Give data; a generator can be read once.")
