"""torch's random number generators: seeded for each shard, and restored afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

State = tuple[Tensor, Tensor | None]


def get_state(device: torch.device) -> State:
    """Returns the states of the generators that a shard on this device may draw from, for `set_state`."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.random.get_rng_state(), cuda


def set_state(state: State, device: torch.device) -> None:
    """Restores the states from `get_state`."""
    torch.random.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def preserve(device: torch.device) -> Iterator[None]:
    """A context in which torch's generators may be seeded; restores their states afterwards."""
    state = get_state(device)
    try:
        yield
    finally:
        set_state(state, device)


def seed_generators(value: int, device: torch.device) -> None:
    """Seeds the generators that a shard on this device may draw from."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)
