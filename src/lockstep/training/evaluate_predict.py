"""Implements `evaluate` and `predict`, which read the data once and leave the state unchanged."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lockstep.core import batches, plan, tree
from lockstep.core.outputs import check_rows
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
    """Opens data for one pass without shuffling; raises BatchError for infinite data if `steps` is None."""
    source = session.open_data(data, batch_size, shuffle=False, default=default)
    if source.endless and steps is None:
        raise BatchError(
            "This data is infinite. Give the number of batches to evaluate or predict, e.g. steps=100 "
            "(validation_steps= in fit), or leave out .repeat()."
        )
    return source


def _choose_inputs(session: Session, data: Any) -> Any:
    """Returns the data given to `predict`, with a list of several inputs as a tuple.

    Raises BatchError for a list of arrays that may be several inputs or several batches, except for a Keras model.
    """
    if not batches.is_list_of_arrays(data):
        return data
    if len(data) == 1:
        return data[0]
    if not session.recipe.habits.lists:
        raise BatchError(
            f"The list of arrays {batches.describe(tuple(data))} may be several inputs or several batches. Use "
            "predict((x1, x2)) for several inputs, or predict(iter([x1, x2])) for several batches."
        )
    return tuple(data)


def evaluate_data(
    session: Session, data: Any, batch_size: int | None, steps: int | None, verbose: int | str
) -> dict[str, float]:
    """Returns loss and metrics over the data by name, and prints them depending on `verbose`."""
    source = open_pass(session, data, batch_size, steps=steps)
    line = PassLine(verbose, session.recipe.habits.words)
    values = evaluate(session, source, steps, line.count)
    if session.processes.first:
        line.print_values(values)
    return values


def predict_data(session: Session, data: Any, batch_size: int | None, steps: int | None, verbose: int | str) -> Any:
    """Returns the outputs for the inputs in the data as numpy arrays, and prints a line depending on `verbose`."""
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
    """Returns the outputs for one batch of inputs, as the framework's own arrays."""
    given = _choose_inputs(session, inputs) if session.recipe.habits.lists else inputs
    return session.backend.native(_predict(session, iter([given])))


def _read(begin: Read) -> Iterator[Any]:
    return begin()


def evaluate(
    session: Session, data: Source, steps: int | None = None, over: Callable[[Read], Iterator[Any]] = _read
) -> dict[str, float]:
    """Returns loss and metrics over the first `steps` batches by name, with every example counted once.

    With `steps=None` all batches are read. `over` is called with a function that returns an iterator over the batches,
    and yields these batches; it may count them, or stop early.
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
    """Returns the outputs for all batches of inputs, concatenated."""
    rows = []
    for num_shards, num_examples, shards in _gather(session, commands.predict, inputs):
        sizes = plan.sizes(num_examples, num_shards)
        for shard in sorted(shards):
            check_rows(shards[shard], sizes[shard])
            rows.append(shards[shard])
    return batches.join(rows, np.concatenate)


def _gather(session: Session, command: Command, read: Iterator[Any]) -> Iterator[tuple[int, int, dict[int, Any]]]:
    """Runs a command for each batch; yields its number of shards, its number of examples, and its results by shard.

    All batches have the same number of shards, which is chosen at the first batch if the run has none yet.
    """
    num_shards = None
    reduction = session.run.reduction
    for index, batch in enumerate(read):
        num_examples = batches.count(batch)
        num_shards = num_shards or session.num_shards(num_examples)
        if command is commands.evaluate and reduction is None:  # for this pass only; the first step finds it out again
            reduction = session.read_reduction(batch)
        yield num_shards, num_examples, session.run_on_batch(command, batch, index, num_shards, reduction)
    if num_shards is None:
        raise BatchError(
            "The data has no batch. Use data with at least one example; a generator, for example, can be read only "
            "once."
        )
