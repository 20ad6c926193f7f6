"""Passes over data that change nothing, for `evaluate` and `predict`."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lockstep.core import batches, plan, tree
from lockstep.data.source import Source
from lockstep.display.verbosity import PassLine
from lockstep.errors import BatchError
from lockstep.processes import commands
from lockstep.processes.commands import Command
from lockstep.training.session import Session
from lockstep.training.step_logs import Totals

Read = Callable[[], Iterator[Any]]


def open_pass(
    session: Session, data: Any, batch_size: int | None, default: int | None = None, steps: int | None = None
) -> Source:
    """Return the source of data that is read once, in its own order; raise if it is endless and `steps` is None."""
    source = session.open_data(data, batch_size, shuffle=False, default=default)
    if source.endless and steps is None:
        raise BatchError(
            "Data to evaluate or predict has an end. Got endless data. Give steps=100, say (validation_steps= in fit), "
            "or leave out .repeat()."
        )
    return source


def _choose_inputs(session: Session, data: Any) -> Any:
    """Return the data of `predict` with several inputs in a tuple; raise if a list may as well be several batches."""
    if not batches.is_list_of_arrays(data):
        return data
    if len(data) == 1:
        return data[0]
    if not session.recipe.habits.lists:
        raise BatchError(
            "Several inputs are a tuple, several batches come from an iterator; a list of arrays may be either. "
            f"Got {batches.describe(tuple(data))} in a list. Use predict((x1, x2)), or predict(iter([x1, x2]))."
        )
    return tuple(data)


def evaluate_data(
    session: Session, data: Any, batch_size: int | None, steps: int | None, verbose: int | str
) -> dict[str, float]:
    """Return loss and metrics over the data, and print the line that `verbose` asks for."""
    source = open_pass(session, data, batch_size, steps=steps)
    line = PassLine(verbose, session.recipe.habits.words)
    values = evaluate(session, source, steps, line.count)
    if session.processes.first:
        line.print_values(values)
    return values


def predict_data(session: Session, data: Any, batch_size: int | None, steps: int | None, verbose: int | str) -> Any:
    """Return the outputs for the inputs in the data, and print the line that `verbose` asks for."""
    inputs = _choose_inputs(session, data)
    is_inputs = isinstance(inputs, dict | tuple) or batches.is_array(inputs)
    line = PassLine(verbose, session.recipe.habits.words)
    source = open_pass(session, inputs, batch_size, steps=steps)
    read = line.count(lambda: islice(source.epoch(0), steps))
    rows = _predict(session, read if is_inputs else map(batches.inputs, read))
    if session.processes.first:
        line.print_values({})
    return rows


def predict_batch(session: Session, inputs: Any) -> Any:
    """Return the outputs for one batch of inputs, as the framework's own arrays."""
    given = _choose_inputs(session, inputs) if session.recipe.habits.lists else inputs
    return session.backend.native(_predict(session, iter([given])))


def _read(begin: Read) -> Iterator[Any]:
    return begin()


def evaluate(
    session: Session, data: Source, steps: int | None = None, over: Callable[[Read], Iterator[Any]] = _read
) -> dict[str, float]:
    """Return loss and metrics over the first `steps` batches, or all, every example counted once.

    `over` iterates over the batches that a function begins to read, and may count or interrupt them.
    """
    metrics = session.metric_objects.start()
    totals = Totals(session.columns, others=metrics.values)
    for num_shards, _, shards in _gather(session, commands.evaluate, over(lambda: islice(data.epoch(0), steps))):
        session.update_metrics(metrics, num_shards)
        sums = tree.fold([shards.get(shard) for shard in range(num_shards)], np.add)
        assert sums is not None
        totals.add(sums)
    return dict(totals)


def _predict(session: Session, inputs: Iterator[Any]) -> Any:
    """Return the outputs for every batch of inputs, put end to end."""
    rows = []
    for num_shards, num_examples, shards in _gather(session, commands.predict, inputs):
        sizes = plan.sizes(num_examples, num_shards)
        for shard in sorted(shards):
            batches.check_rows(shards[shard], sizes[shard])
            rows.append(shards[shard])
    return batches.join(rows, np.concatenate)


def _gather(session: Session, command: Command, read: Iterator[Any]) -> Iterator[tuple[int, int, dict[int, Any]]]:
    """Yield for every batch the numbers of shards and examples, and every shard's answer; the first batch decides."""
    num_shards = None
    reduction = session.run.reduction
    for index, batch in enumerate(read):
        num_examples = batches.count(batch)
        num_shards = num_shards or session.num_shards(num_examples)
        if command is commands.evaluate and reduction is None:  # for this pass alone: the first step decides
            reduction = session.read_reduction(batch)
        works, _ = session.plan(batch, index, num_shards, reduction)
        yield num_shards, num_examples, session.gather(command, works)
    if num_shards is None:
        raise BatchError("Data holds at least one batch. Got none. Give data; a generator can be read once.")
