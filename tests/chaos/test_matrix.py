"""A fault of every kind at every named point of the protocol: the run goes on with the same bits."""

import pytest

from chaos.faults import EVALUATE, PROVE, START, STEP
from chaos.harness import DATA, Chaos, Fault, Undisturbed, list_kinds


@pytest.fixture(scope="module")
def undisturbed():
    return Undisturbed()


def chunk(point, devices):
    """Yields (seat, kind) for as many faults at a time as there are workers, so that their seats are filled at once."""
    kinds = list_kinds(point)
    size = 1 if point == START[0] else devices - 1  # at first a process does not know its seat, and takes any fault
    for start in range(0, len(kinds), size):
        yield list(enumerate(kinds[start : start + size], start=1))


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("point", STEP)
def test_in_a_step(devices, point, undisturbed, tmp_path):
    with Chaos(tmp_path, devices, undisturbed) as chaos:
        for faults in chunk(point, devices):
            for seat, kind in faults:
                chaos.order(Fault(point, kind, seat))
                chaos.train()
            chaos.check_faults(*(kind for _, kind in faults))


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("point", EVALUATE)
def test_in_an_evaluation(devices, point, undisturbed, tmp_path):
    with Chaos(tmp_path, devices, undisturbed) as chaos:
        for faults in chunk(point, devices):
            expected = chaos.trainer.evaluate(DATA)
            for seat, kind in faults:
                chaos.order(Fault(point, kind, seat))
                assert chaos.trainer.evaluate(DATA) == expected
            chaos.check_faults(*(kind for _, kind in faults))


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("point", START + PROVE)
def test_in_a_process_that_replaces_another(devices, point, undisturbed, tmp_path):
    with Chaos(tmp_path, devices, undisturbed) as chaos:
        for faults in chunk(point, devices):
            for seat, kind in faults:
                chaos.order(Fault("step, all sums there", "kill", seat), Fault(point, kind, seat))
                chaos.train()
            chaos.check_faults(*(each for _, kind in faults for each in ("kill", kind)))
