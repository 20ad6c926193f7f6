"""Refuses a forward pass that writes numbers or arrays to attributes of blocks for the next pass to read.

Attributes are not part of the state: which shards read what a shard has written there depends on how many shards a
context computes, and no checkpoint has it. A pass may read a number or string, but not change it. It may write an
array, e.g. an attention map. Then the next shard is computed twice, the second time from the attributes as they were
before the array was written. Its gradient, its sums and the arrays that it writes must have the same bytes both times.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from lockstep.backends.mxnet.held_values import HeldValues, find_blocks, iterate_names
from lockstep.errors import ExactError

TRIALS = 4  # how many passes are computed twice after a pass has written an array


class AttributeGuard:
    """Checks the attributes of a model and its loss during one command: call `begin`, run `passes`, call `check`."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._blocks: list[Any] = []
        self._start: HeldValues | None = None  # the values before the first pass
        self._before: HeldValues | None = None  # the values before the last pass, if it has written arrays
        self._num_trials = TRIALS
        self._commands = 0
        self._has_written_arrays = False
        self._is_trying = True  # whether passes of this command are computed twice

    def begin(self, num_shards: int) -> None:
        """Copies the attributes' values before the first pass; with one shard no pass is computed twice."""
        self._blocks = find_blocks(self._roots)
        self._commands += 1
        self._has_written_arrays = False
        self._before = None  # the script may have written to the attributes since
        # A pass may begin to write arrays later, so trials start again, after 1, 2, 4, 8, ... commands.
        if self._commands & (self._commands - 1) == 0:
            self._num_trials = self._num_trials or TRIALS
        self._is_trying = bool(self._num_trials) and num_shards > 1
        self._start = HeldValues(self._blocks, with_arrays=self._is_trying)

    def passes(self, results: Callable[[], list[NDArray[Any]]]) -> Iterator[None]:
        """Yields once for a pass over a shard, and again if it must be computed a second time.

        `results` copies what the last pass has computed to the host.
        """
        if not (self._is_trying and self._num_trials and self._blocks):
            yield
            return
        before, self._before = self._before, None
        now = HeldValues(self._blocks, with_arrays=True)
        yield
        self._check_numbers()
        if before is not None:
            yield from self._compute_twice(before, results)
        if now.has_changed():
            self._before, self._has_written_arrays = now, True

    def _compute_twice(self, before: HeldValues, results: Callable[[], list[NDArray[Any]]]) -> Iterator[None]:
        """Lets the caller compute the pass again from the attributes `before` the last shard; compares the results."""
        after = HeldValues(self._blocks, with_arrays=True)
        own = results()
        before.restore()
        try:
            yield
            other = HeldValues(self._blocks, with_arrays=True)
            is_equal = all(map(_is_equal, own, results()))
        finally:  # also if the pass raises: the loop over this generator then closes it
            after.restore()
        where = after.find_difference(other)
        if where is None and is_equal:
            self._num_trials -= 1
            return
        where = where or next(iterate_names(before.containers), "an attribute")
        assert self._start is not None
        self._start.restore()
        raise ExactError(
            f"A forward pass writes an array to {where!r} that changes the results of the next shard. Results would "
            "depend on the number of devices, and no checkpoint has the array. "
            f"{_explain(where, after.get_shape(where), '')}"
        )

    def check(self) -> None:
        """Raises ExactError if a pass has changed a number or string, and restores it; new attributes are allowed."""
        self._check_numbers()
        if self._is_trying and not self._has_written_arrays:
            self._num_trials = 0

    def _check_numbers(self) -> None:
        assert self._start is not None
        changed = self._start.find_changed_number()
        if changed is not None:
            name, before, now = changed
            self._start.restore()
            way_out = _explain(name, (1,), " (dtype='int64' if it counts)")
            raise ExactError(
                f"A forward pass has changed {name!r} from {before!r} to {now!r}. The value would depend on the number "
                f"of devices, and no checkpoint has it. {way_out}"
            )

    @contextmanager
    def restore_afterwards(self) -> Iterator[None]:
        """Restores every attribute at the end of this context, so that an evaluation does not change the training."""
        values = HeldValues(find_blocks(self._roots), with_arrays=True)
        try:
            yield
        finally:
            values.restore()


def _explain(name: str, shape: tuple[int, ...], more: str) -> str:
    attribute = name.partition(".")[2].partition("[")[0] or "value"
    return (
        f"Make it a parameter without a gradient: self.{attribute} = self.params.get({attribute!r}, shape={shape}, "
        f"init='zeros', grad_req='null') in __init__{more}, which the pass writes inside of autograd.pause(): "
        f"self.{attribute}.data(x.ctx)[:] = value; or use lockstep.wrap(..., exact=False)."
    )


def _is_equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.tobytes() == other.tobytes()
