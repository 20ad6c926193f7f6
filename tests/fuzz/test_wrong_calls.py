"""Wrong calls are refused in words, change nothing and end.

`LOCKSTEP_FUZZ_CALLS=1000 pytest tests/fuzz` makes more of them.
"""

import os

import pytest

from fuzz.wrong_calls import run

CALLS = int(os.environ.get("LOCKSTEP_FUZZ_CALLS", "400"))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_wrong_calls(framework):
    found = run(framework, CALLS)
    assert found.faults == []
    assert len(found.unclear) <= 0.02 * CALLS, "\n".join(found.unclear)
    assert found.outcomes["refused"] > CALLS / 2, found.outcomes  # the calls were wrong
