"""Generators: torch's random state, borrowed for the shards and given back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def borrowed(device: torch.device) -> Iterator[None]:
    """Inside, torch's generators may be seeded at will; afterwards they are as they were."""
    cpu = torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.random.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def seed(value: int, device: torch.device) -> None:
    """Seeds the generators that a shard on this device may draw from."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)
