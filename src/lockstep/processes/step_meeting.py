"""The vector with which launched processes agree on a step, once they have computed it.

It has checksums of the call, of the batch and of what the script may change. These are equal in nearly every step, so
no process waits for the others before it computes. If the script of a process has changed something, the attempt is
aborted, and the processes meet before they compute until a step without changes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.errors import AttemptAborted
from lockstep.exchange.torch_distributed import ProcessGroup
from lockstep.launch.deferred_signals import defer_interrupts


class StepMeeting:
    """This process's side of the meetings of all steps.

    `check` gets the vectors of all processes. It raises an error if they do not fit together, and returns whether the
    script of a process has changed something. `abandoned` is the vector that is sent if this process fails.
    """

    def __init__(self, wire: ProcessGroup, check: Callable[[list[list[int]]], bool], abandoned: Sequence[int]) -> None:
        self.filled = 0
        self.size = len(abandoned)
        self.comes_first = True  # whether the processes meet before they compute the next step
        self._wire = wire
        self._check = check
        self._abandoned = abandoned
        self._facts: Sequence[int] = ()
        self._is_known = True  # whether the others know of this attempt
        self._has_changed = False

    def begin(self, facts: Sequence[int], filled: int, has_changed: bool) -> None:
        """Begins an attempt; `has_changed` says whether the processes have already met and found a change."""
        self._facts, self.filled, self._has_changed = facts, filled, has_changed
        self._is_known = False
        self.comes_first = True  # also if the attempt fails

    def meet(self, numbers: Any) -> Any:
        """Sends the numbers beside the facts of the step, and returns the numbers of all processes.

        Raises AttemptAborted in every process if the script of one has changed something.
        """
        self._is_known = True
        everyone = self._wire.gather_control(self._facts, numbers)
        if self._check(everyone[:, : self.size].tolist()):
            raise AttemptAborted("The script of a process has changed the model or the optimizer before this step.")
        return everyone[:, self.size :]

    def meet_early(self) -> None:
        """Waits, before the step is computed, until all processes are at this step; raises as `meet` does."""
        with defer_interrupts():  # `abandon` must know that the step's own meeting is still to come
            self.meet(())
            self._is_known = False

    def abandon(self) -> None:
        """Reports that this process does not make the step, unless the others know that already."""
        if not self._is_known:
            self._is_known = True
            self._wire.gather(self._abandoned)

    def commit(self) -> None:
        """Records that the step was committed."""
        self.comes_first = self._has_changed
