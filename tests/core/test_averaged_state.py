"""Queues among the float state: how they are recognized, and in which steps."""

import numpy as np
import pytest

from lockstep.core.averaged_state import FOLLOWED, AveragedArray, QueueGuard, find_replaced_axis
from lockstep.core.layout import Layout
from lockstep.errors import ModelError

BEFORE = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
LAYOUT = Layout.build([("w", "float32", (3,))], [("queue", "float32", (4, 2)), ("sums", "float64", (3,))])


def run_step(guard, rows, before=BEFORE, fraction=0.25):
    """Return whether a step was checked in which a shard adds 100 to these rows."""
    if not guard.is_due():
        return False
    leaf = {"float32": np.zeros(LAYOUT.lengths["float32"], np.float32)}
    after = before.copy()
    after[rows] += 100
    field = LAYOUT.fields[1]
    leaf["float32"][field.offset : field.offset + field.size] = (after * np.float32(fraction)).ravel()
    guard.check(leaf, fraction, LAYOUT, lambda: [AveragedArray("queue", "queue", before)], lambda part: part)
    return True


@pytest.mark.parametrize("fraction", [0.25, 1 / 3, 6 / 23])
def test_a_row_that_one_shard_replaces_is_refused(fraction):
    with pytest.raises(ModelError, match=r"replaces some slices of the buffer 'queue' of shape \(.*\) along axis 0"):
        run_step(QueueGuard(), [1], fraction=fraction)


def test_an_array_that_changes_everywhere_is_checked_in_three_steps_and_at_powers_of_two():
    guard = QueueGuard()
    assert [run_step(guard, [0, 1, 2, 3]) for _ in range(9)] == [True] * 4 + [False] * 3 + [True, False]
    run_step(guard, [1])  # known by now to be no queue


def test_an_array_that_begins_to_change_later_is_seen_at_the_next_power_of_two():
    guard = QueueGuard()
    assert [run_step(guard, []) for _ in range(7)] == [True] * 4 + [False] * 3
    with pytest.raises(ModelError, match="as in a queue"):
        run_step(guard, [2])


def test_an_array_that_changes_once_is_followed_for_a_while():
    guard = QueueGuard()
    checked = [run_step(guard, [0, 1, 2, 3] if not step else []) for step in range(130)]
    assert all(checked[: FOLLOWED + 1])
    assert [step for step, each in enumerate(checked, start=1) if each and step > FOLLOWED + 1] == [128]


def test_a_queue_that_begins_empty_is_seen_once_it_holds_something():
    guard, empty = QueueGuard(), np.zeros((4, 2), np.float32)
    for step in range(3):
        run_step(guard, [step % 4] if not step else [], empty)
    with pytest.raises(ModelError, match="as in a queue"):
        run_step(guard, [1], np.where(np.arange(4)[:, None] == 0, 100, empty).astype(np.float32))


@pytest.mark.parametrize(
    ("before", "after", "axis"),
    [
        ([[1, 2], [3, 4]], [[5, 6], [3, 4]], 0),
        ([[1, 2], [3, 4]], [[5, 2], [6, 4]], 1),
        ([[1, 2], [0, 0]], [[5, 6], [0, 0]], None),  # a mean that is still 0
        ([[1, 2], [3, 4]], [[1.1, 2.1], [3, 4]], None),  # moved by a part of itself
        ([[1, 2], [3, 4]], [[5, 2], [3, 4]], None),  # one number
        ([[1], [3]], [[5], [3]], None),  # rows of one element
        ([1, 3], [5, 3], None),
        ([[1, 2], [3, 4]], [[5, 6], [3.000001, 4]], 0),  # rounded
        ([[1, 2]], [[5, 6]], None),
        ([[1, 2], [3, 4]], [[5, 6], [7, 8]], None),
    ],
)
def test_arrays_that_are_recognized_as_queues(before, after, axis):
    assert find_replaced_axis(np.array(before, np.float32), np.array(after, np.float32)) == axis
