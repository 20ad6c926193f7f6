"""What the others know of a step when this process is interrupted while they meet."""

import signal

import numpy as np
import pytest

from lockstep.processes.step_meeting import StepMeeting


class Wire:
    """Messages to processes that send the same."""

    def __init__(self):
        self.sent = []

    def gather_control(self, facts, numbers):
        signal.raise_signal(signal.SIGINT)
        return np.array([[*facts, *numbers]])

    def gather(self, numbers):
        self.sent.append(numbers)


def test_who_is_interrupted_in_an_early_meeting_still_abandons_the_step():
    wire = Wire()
    meeting = StepMeeting(wire, lambda everyone: False, [-3, 0])
    meeting.begin([1, 2], 4, False)
    with pytest.raises(KeyboardInterrupt):
        meeting.meet_early()
    meeting.abandon()
    assert wire.sent == [[-3, 0]]
