"""Refuse a forward pass that leaves numbers or arrays in attributes of blocks for the next pass to read.

An attribute belongs to the process and not to the state: what it carries from shard to shard depends on how many
shards a context has computed, and no checkpoint has it. A number or string may be read but not changed. An array may be
left there, e.g. an attention map: a shard is then computed a second time from the attributes as they were before the
pass before it, and its gradient, sums and the arrays it leaves must have the same bytes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.mxnet.held_values import HeldValues, find_blocks, iterate_names
from lockstep.errors import ExactError

TRIALS = 4  # passes that are computed twice once arrays were left somewhere


class AttributeGuard:
    """The attributes of a model and its loss during one command: `begin`, the `passes`, then `check`."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._watched: list[Any] = []
        self._start: HeldValues | None = None  # the values before the first pass
        self._before: HeldValues | None = None  # the values before the last pass, while it is tried
        self._trials = TRIALS
        self._commands = 0
        self._has_left = False
        self._tries = True  # whether passes of this command are computed twice

    def begin(self, num_shards: int) -> None:
        """Remember the values as they are before the first pass; with one shard nothing is tried."""
        self._watched = find_blocks(self._roots)
        self._commands += 1
        self._has_left = False
        # The script may have written to them since, and a pass may do later what it does not do now.
        self._before = None
        if self._commands & (self._commands - 1) == 0:
            self._trials = self._trials or TRIALS
        self._tries = bool(self._trials) and num_shards > 1
        self._start = HeldValues(self._watched, with_arrays=self._tries)

    def passes(self, results: Callable[[], list[NDArray[Any]]]) -> Iterator[None]:
        """Yield once for a pass over a shard, and again while what other passes have left is tried.

        `results` gives what the last pass has computed, on the host.
        """
        if not (self._tries and self._trials and self._watched):
            yield
            return
        before, self._before = self._before, None
        now = HeldValues(self._watched, with_arrays=True)
        yield
        self._check_numbers()
        if before is not None:
            yield from self._try(before, results)
        if now.has_changed():
            self._before, self._has_left = now, True

    def _try(self, before: HeldValues, results: Callable[[], list[NDArray[Any]]]) -> Iterator[None]:
        """Have the last pass made again from the attributes `before` the one before it, and compare."""
        after = HeldValues(self._watched, with_arrays=True)
        own = results()
        before.restore()
        try:
            yield
            other = HeldValues(self._watched, with_arrays=True)
            equal = all(map(_equal, own, results()))
        finally:  # also if the pass raises: the loop over this generator then closes it
            after.restore()
        where = after.find_difference(other)
        if where is None and equal:
            self._trials -= 1
            return
        where = where or next(iterate_names(before.places), "an attribute")
        assert self._start is not None
        self._start.restore()
        raise ExactError(
            "A forward pass leaves no arrays in attributes that change what the next pass gives: no checkpoint has "
            "them, and they would depend on the number of devices. Got other bits for a shard after another than by "
            f"itself, with what is left in {where!r}. {_explain(where, after.shape(where), '')}"
        )

    def check(self) -> None:
        """Raise if a number or string has become another, and put it back. Where there was none, one may be set."""
        self._check_numbers()
        if self._tries and not self._has_left:
            self._trials = 0

    def _check_numbers(self) -> None:
        assert self._start is not None
        changed = self._start.find_changed_number()
        if changed is not None:
            name, before, now = changed
            self._start.restore()
            way_out = _explain(name, (1,), " (dtype='int64' if it counts)")
            raise ExactError(
                f"A forward pass leaves the numbers and strings of its blocks as they are. {name!r} was {before!r} and "
                f"is {now!r}, and would depend on the number of devices. {way_out}"
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put every attribute back afterwards: an evaluation changes nothing that training reads."""
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


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.tobytes() == other.tobytes()


def copy_vectors(leaf: Any) -> list[NDArray[Any]]:
    """Copy the vectors of a leaf to the host."""
    return [np.array(vector.asnumpy()) for vector in leaf.values()]
