"""Random faults: several in a run, often two in one step. `LOCKSTEP_CHAOS_SEED` repeats a run that has failed."""

import os
import random

import pytest

from chaos.harness import Chaos, Undisturbed, draw_faults

NUM_FAULTS = int(os.environ.get("LOCKSTEP_CHAOS_FAULTS", "50"))
SEED = int(os.environ.get("LOCKSTEP_CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.mark.timeout(120 + 5 * NUM_FAULTS)
@pytest.mark.parametrize("devices", [3, 4])
def test_random_faults(devices, tmp_path):
    print(f"LOCKSTEP_CHAOS_SEED={SEED}")  # which pytest shows if this fails
    generator = random.Random(SEED + devices)
    count = 0
    with Chaos(tmp_path, devices, Undisturbed()) as chaos:
        while count < NUM_FAULTS / 2:
            faults = draw_faults(generator, devices)
            print(faults)
            chaos.order_later(*faults)
            chaos.check_faults(*(fault.kind for fault in faults))
            count += len(faults)
